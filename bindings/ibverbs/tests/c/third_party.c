/*
 * A benchmark, not a test: how much a stopped process slows a third one. The parent writes to two children,
 * 32 KiB at a time; one of them is stopped repeatedly. Prints the throughput to the other child meanwhile.
 *
 * cc -O2 -o third_party third_party.c -libverbs && dquant run -- ./third_party [rc|uc] [rounds]
 */
#include "kit.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>

enum { LENGTH = 32768, DEEP = 8, PHASE_MS = 500, MAX_ROUNDS = 99 };

struct child {
	struct side side;
	int other;
	pid_t pid; /* 0 in the child */
	struct card {
		uint32_t qpn, rkey;
		unsigned char *bytes;
	} peer;
	int posted;
	long written;
};

static void exchange(struct child *own)
{
	struct card card = { own->side.qp->qp_num, own->side.mr->rkey, own->side.bytes };
	EQUAL(write(own->other, &card, sizeof card), sizeof card);
	EQUAL(read(own->other, &own->peer, sizeof own->peer), sizeof own->peer);
	to_init(own->side.qp);
	to_rts(own->side.qp, own->peer.qpn);
}

/* Forks before any device is open. */
static struct child fork_child(enum ibv_qp_type type)
{
	struct child own = { 0 };
	int ends[2];
	EQUAL(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
	CHECK((own.pid = fork()) >= 0);
	own.other = ends[!own.pid];
	close(ends[!!own.pid]);
	if (own.pid)
		return own;
	EQUAL(prctl(PR_SET_PDEATHSIG, SIGKILL), 0);
	own.side = make_side(open_device(), type);
	exchange(&own);
	for (;;)
		pause();
}

static void fill(struct child *to)
{
	for (; to->posted < DEEP; to->posted++) {
		struct ibv_send_wr wr = remote(IBV_WR_RDMA_WRITE, to->peer.bytes, to->peer.rkey);
		EQUAL(post(&to->side, wr, 0, LENGTH), 0);
	}
}

static void reap(struct child *to)
{
	struct ibv_wc wc[DEEP];
	int got = ibv_poll_cq(to->side.cq, DEEP, wc);
	CHECK(got >= 0);
	for (int i = 0; i < got; i++)
		EQUAL(wc[i].status, IBV_WC_SUCCESS);
	to->posted -= got;
	to->written += got;
}

/* Writes to `third`, and to `other` if not null, for PHASE_MS. Returns bytes per second to `third`. */
static double phase(struct child *third, struct child *other)
{
	double begin = seconds(), end = begin + PHASE_MS / 1e3;
	third->written = 0;
	while (seconds() < end) {
		fill(third);
		reap(third);
		if (other) {
			fill(other);
			reap(other);
		}
	}
	return third->written * (double)LENGTH / (seconds() - begin);
}

static int ascending(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static double median(double *values, int count)
{
	qsort(values, count, sizeof *values, ascending);
	return values[count / 2];
}

int main(int argc, char **argv)
{
	enum ibv_qp_type type = argc > 1 && !strcmp(argv[1], "uc") ? IBV_QPT_UC : IBV_QPT_RC;
	int rounds = argc > 2 ? atoi(argv[2]) : 10;
	double alone[MAX_ROUNDS], stopped[MAX_ROUNDS], ratios[MAX_ROUNDS];
	CHECK(rounds > 0 && rounds <= MAX_ROUNDS);
	struct child third = fork_child(IBV_QPT_RC), other = fork_child(type);
	struct ibv_context *context = open_device();
	third.side = make_side(context, IBV_QPT_RC);
	other.side = make_side(context, type);
	exchange(&third);
	exchange(&other);
	usleep(100000);
	for (int round = 0; round < rounds; round++) {
		double before = phase(&third, NULL);
		EQUAL(kill(other.pid, SIGSTOP), 0);
		stopped[round] = phase(&third, &other);
		EQUAL(kill(other.pid, SIGCONT), 0);
		while (other.posted)
			reap(&other);
		double after = phase(&third, NULL);
		alone[round] = (before + after) / 2;
		ratios[round] = stopped[round] / alone[round];
	}
	printf("third party alone: %.0f MB/s\n", median(alone, rounds) / 1e6);
	printf("while another peer (%s) is stopped: %.0f MB/s\n", type == IBV_QPT_UC ? "UC" : "RC",
	       median(stopped, rounds) / 1e6);
	double middle = median(ratios, rounds);
	printf("ratio, median of %d pairs: %.3f (%.3f to %.3f)\n", rounds, middle, ratios[0], ratios[rounds - 1]);
	return 0;
}
