/* Connections wait for stopped peers of this machine, but not for peers that have ended. Peers that end acknowledge before. */
#include "kit.h"

#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>

enum { LENGTH = 8192, ROUNDS = 2000, STOPS = 3, STOPPED_S = 1 /* twice the duration of all retries */ };

/* Without the kernel's report of unread bytes at UDP sockets, a stopped peer cannot be detected. */
static void needs_udp_diag(void)
{
	struct {
		struct nlmsghdr header;
		struct inet_diag_req_v2 request;
	} ask = { { .nlmsg_len = sizeof ask, .nlmsg_type = SOCK_DIAG_BY_FAMILY,
		    .nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP },
		  { .sdiag_family = AF_INET, .sdiag_protocol = IPPROTO_UDP, .idiag_states = ~0U } };
	union {
		struct nlmsghdr header;
		char bytes[1 << 15];
	} answer;
	int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
	if (fd < 0 || send(fd, &ask, sizeof ask, 0) < 0 || recv(fd, &answer, sizeof answer, 0) < 0 ||
	    answer.header.nlmsg_type == NLMSG_ERROR)
		skip("no sock_diag for UDP");
	close(fd);
}

/* One of two processes whose queue pairs are connected. */
struct process {
	struct side side;
	int other; /* a socket to the other process */
	pid_t child; /* 0 in the child */
	struct card {
		uint32_t qpn, rkey;
		unsigned char *bytes;
	} peer;
};

static struct process fork_connected(void)
{
	struct process own;
	int ends[2];
	EQUAL(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
	fflush(NULL);
	CHECK((own.child = fork()) >= 0);
	own.other = ends[!own.child];
	close(ends[!!own.child]);
	if (!own.child) /* a stopped child would outlive a failed test */
		EQUAL(prctl(PR_SET_PDEATHSIG, SIGKILL), 0);
	own.side = make_side(open_device(), IBV_QPT_RC);
	struct card card = { own.side.qp->qp_num, own.side.mr->rkey, own.side.bytes };
	EQUAL(write(own.other, &card, sizeof card), sizeof card);
	EQUAL(read(own.other, &own.peer, sizeof own.peer), sizeof own.peer);
	to_init(own.side.qp);
	to_rts(own.side.qp, own.peer.qpn);
	char byte = 0;
	EQUAL(write(own.other, &byte, 1), 1);
	EQUAL(read(own.other, &byte, 1), 1);
	return own;
}

static void release(struct process *own)
{
	struct ibv_context *context = own->side.context;
	destroy_side(&own->side);
	EQUAL(ibv_close_device(context), 0);
	close(own->other);
}

static void stop(const struct process *own)
{
	int status;
	EQUAL(kill(own->child, SIGSTOP), 0);
	EQUAL(waitpid(own->child, &status, WUNTRACED), own->child);
	CHECK(WIFSTOPPED(status));
}

static void end_child(const struct process *own)
{
	EQUAL(kill(own->child, SIGKILL), 0);
	EQUAL(waitpid(own->child, NULL, 0), own->child);
}

/* Writes `value` to the second part of the other's memory. */
static void post_write(const struct process *own, unsigned char value)
{
	memset(own->side.bytes, value, LENGTH);
	EQUAL(post(&own->side, remote(IBV_WR_RDMA_WRITE, own->peer.bytes + LENGTH, own->peer.rkey), 0, LENGTH), 0);
}

static void nothing_completes_while_it_is_stopped(const struct process *own)
{
	struct ibv_wc wc;
	for (double end = seconds() + STOPPED_S; seconds() < end; usleep(1000))
		EQUAL(ibv_poll_cq(own->side.cq, 1, &wc), 0);
	EQUAL(state_of(own->side.qp), IBV_QPS_RTS);
}

/* Both processes write to each other; the child is stopped repeatedly. */
static void a_stopped_peer_is_waited_for(void)
{
	struct process own = fork_connected();
	for (int round = 1; round <= ROUNDS; round++) {
		int stops = own.child && round % (ROUNDS / STOPS) == 100;
		if (stops)
			stop(&own);
		post_write(&own, round % 251);
		if (stops) {
			nothing_completes_while_it_is_stopped(&own);
			EQUAL(kill(own.child, SIGCONT), 0);
		}
		expect(own.side.cq, IBV_WC_SUCCESS);
		EQUAL(post(&own.side, remote(IBV_WR_RDMA_READ, own.peer.bytes + LENGTH, own.peer.rkey),
			   2 * LENGTH, LENGTH), 0);
		expect(own.side.cq, IBV_WC_SUCCESS);
		CHECK(all_are(own.side.bytes + 2 * LENGTH, LENGTH, round % 251));
	}
	char byte = 1;
	EQUAL(write(own.other, &byte, 1), 1);
	EQUAL(read(own.other, &byte, 1), 1);
	CHECK(all_are(own.side.bytes + LENGTH, LENGTH, ROUNDS % 251));
	release(&own);
	if (!own.child)
		_exit(0);
	int status;
	EQUAL(waitpid(own.child, &status, 0), own.child);
	EQUAL(status, 0);
}

static void a_peer_that_ends_is_not_waited_for(void)
{
	for (int stopped = 0; stopped < 2; stopped++) {
		struct process own = fork_connected();
		while (!own.child)
			pause();
		if (stopped) {
			stop(&own);
			post_write(&own, 1);
			nothing_completes_while_it_is_stopped(&own);
			end_child(&own);
		} else {
			end_child(&own);
			post_write(&own, 1);
		}
		expect(own.side.cq, IBV_WC_RETRY_EXC_ERR);
		release(&own);
	}
}

/* The child ends as soon as it has the last message. Before, its progress thread has learnt that it polls. */
static void the_last_message_is_acknowledged_before_the_end(void)
{
	enum { MESSAGES = 300 };
	for (int end = 0; end < 12; end++) {
		struct process own = fork_connected();
		for (int message = 0; own.child && message < MESSAGES; message++) {
			EQUAL(post(&own.side, (struct ibv_send_wr){ .opcode = IBV_WR_SEND }, 0, 64), 0);
			expect(own.side.cq, IBV_WC_SUCCESS);
		}
		if (own.child) {
			EQUAL(waitpid(own.child, NULL, 0), own.child);
			release(&own);
			continue;
		}
		EQUAL(post_receive(&own.side, 0, 0, 64), 0);
		for (int message = 1; message <= MESSAGES; message++) {
			struct ibv_wc wc;
			if (message < MESSAGES)
				EQUAL(post_receive(&own.side, message, 0, 64), 0);
			while (!ibv_poll_cq(own.side.cq, 1, &wc))
				;
		}
		if (end % 3 == 0)
			exit(0);
		if (end % 3 == 1)
			EQUAL(set_state(own.side.qp, IBV_QPS_RESET), 0);
		else
			EQUAL(ibv_close_device(own.side.context), 0);
		_exit(0);
	}
}

int main(int argc, char **argv)
{
	static const struct test cases[] = {
		CASE(a_stopped_peer_is_waited_for),
		CASE(a_peer_that_ends_is_not_waited_for),
		CASE(the_last_message_is_acknowledged_before_the_end),
	};
	needs_udp_diag();
	return RUN(cases, argc, argv);
}
