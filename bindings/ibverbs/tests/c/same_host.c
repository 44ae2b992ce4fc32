/* WRITEs and READs between two processes of this machine: the same results with and without packets. */
#define _GNU_SOURCE /* setresuid */
#include "kit.h"

#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>

enum { SPACE = 9 << 20, PAGE = 4096, ROUNDS = 3000, NOBODY = 65534 };

/* One of two processes whose queue pairs are connected. */
struct process {
	struct side side;
	struct ibv_mr *space; /* SPACE bytes that the other may use */
	int other; /* a socket to the other process */
	pid_t child; /* 0 in the child */
	struct card {
		uint32_t qpn, rkey, small_rkey;
		unsigned char *bytes, *small;
	} peer;
};

static int packets_forced(void)
{
	const char *path = getenv("DQUANT_PATH");
	return path && !strcmp(path, "udp");
}

static int memory_is_shared(void)
{
	const char *memory = getenv("DQUANT_MEMORY");
	return memory && !strcmp(memory, "shared");
}

/* Tells the other process to go on, or waits for it. */
static void tell(const struct process *own)
{
	char byte = 0;
	EQUAL(write(own->other, &byte, 1), 1);
}

static void await_other(const struct process *own)
{
	char byte = 0;
	EQUAL(read(own->other, &byte, 1), 1);
}

static void meet(struct process *own)
{
	tell(own);
	await_other(own);
}

struct options {
	int space_access, qp_access;
	uid_t child_user;
	int child_stays_in_rtr;
};

static const struct options USUAL = { EVERY_ACCESS, IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ, 0, 0 };

static struct process fork_connected(struct options options)
{
	struct process own;
	int ends[2];
	EQUAL(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
	fflush(NULL);
	CHECK((own.child = fork()) >= 0);
	own.other = ends[!own.child];
	close(ends[!!own.child]);
	if (!own.child) {
		if (options.child_user)
			EQUAL(setresuid(options.child_user, options.child_user, options.child_user), 0);
		EQUAL(prctl(PR_SET_PDEATHSIG, SIGKILL), 0);
	}
	own.side = make_side(open_device(), IBV_QPT_RC);
	void *space = mmap(NULL, SPACE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(space != MAP_FAILED);
	CHECK(own.space = ibv_reg_mr(own.side.pd, space, SPACE, options.space_access));
	struct card card = { own.side.qp->qp_num, own.space->rkey, own.side.mr->rkey, space, own.side.bytes };
	EQUAL(write(own.other, &card, sizeof card), sizeof card);
	EQUAL(read(own.other, &own.peer, sizeof own.peer), sizeof own.peer);
	to_init(own.side.qp);
	struct ibv_qp_attr attr = { .qp_access_flags = options.qp_access };
	EQUAL(ibv_modify_qp(own.side.qp, &attr, IBV_QP_ACCESS_FLAGS), 0);
	if (!own.child && options.child_stays_in_rtr)
		to_rtr(own.side.qp, own.peer.qpn);
	else
		to_rts(own.side.qp, own.peer.qpn);
	meet(&own);
	return own;
}

static unsigned char *space_of(const struct process *own)
{
	return own->space->addr;
}

static void release(struct process *own)
{
	struct ibv_context *context = own->side.context;
	unsigned char *space = space_of(own);
	if (own->space)
		EQUAL(ibv_dereg_mr(own->space), 0);
	munmap(space, SPACE);
	destroy_side(&own->side);
	EQUAL(ibv_close_device(context), 0);
	close(own->other);
	if (!own->child)
		_exit(0);
	int status;
	EQUAL(waitpid(own->child, &status, 0), own->child);
	CHECK(status == 0 || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
}

/* What `dquant explain` would show of this process. */
static const char *explained(void)
{
	static char text[1 << 20];
	struct sockaddr_un name = { .sun_family = AF_UNIX };
	int length = sprintf(name.sun_path + 1, "dquant-verbs/%d", getpid());
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	socklen_t bytes = offsetof(struct sockaddr_un, sun_path) + 1 + length;
	EQUAL(connect(fd, (struct sockaddr *)&name, bytes), 0);
	size_t have = 0;
	ssize_t got;
	while ((got = read(fd, text + have, sizeof text - 1 - have)) > 0)
		have += got;
	text[have] = 0;
	close(fd);
	return text;
}

static void is_direct(int direct)
{
	const char *text = explained();
	int shown = strstr(text, "\"path\":\"direct\"") != NULL;
	int used = strstr(text, "\"direct_writes\"") != NULL;
	if (shown != direct || used != direct)
		fprintf(stderr, "%s\n", text);
	EQUAL(shown, direct);
	EQUAL(used, direct);
	EQUAL(strstr(text, "\"memory\":{\"ranges\":1,") != NULL, memory_is_shared());
}

static struct ibv_send_wr to_space(const struct process *own, enum ibv_wr_opcode opcode, size_t offset)
{
	return remote(opcode, own->peer.bytes + offset, own->peer.rkey);
}

/* One request between the spaces of both. */
static void exchange(const struct process *own, enum ibv_wr_opcode opcode, size_t from, size_t to, uint32_t length)
{
	struct ibv_sge sge = { (uintptr_t)space_of(own) + from, length, own->space->lkey };
	struct ibv_send_wr wr = to_space(own, opcode, to);
	wr.sg_list = &sge, wr.num_sge = 1;
	EQUAL(post(&own->side, wr, 0, 0), 0);
	struct ibv_wc wc = expect(own->side.cq, IBV_WC_SUCCESS);
	EQUAL(wc.opcode, opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE);
	if (opcode == IBV_WR_RDMA_READ)
		EQUAL(wc.byte_len, length);
}

static void bytes_arrive_and_no_others_change(void)
{
	struct process own = fork_connected(USUAL);
	if (own.child) {
		static const uint32_t lengths[] = { 1, 7, 8, 63, 64, 65, 4096, 65537, 1 << 20, (4 << 20) + 1 };
		unsigned char *mine = space_of(&own);
		uint32_t seed = 1;
		for (size_t at = 0; at < SPACE / 2; at++)
			mine[at] = (seed = seed * 1664525 + 1013904223) >> 24;
		for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
			uint32_t length = lengths[i];
			size_t to = 777 + i, back = SPACE / 2;
			memset(mine + back, 0x5a, length + 2);
			exchange(&own, IBV_WR_RDMA_WRITE, i, to, length);
			exchange(&own, IBV_WR_RDMA_READ, back + 1, to, length);
			CHECK(!memcmp(mine + back + 1, mine + i, length));
			EQUAL(mine[back], 0x5a);
			EQUAL(mine[back + 1 + length], 0x5a);
			exchange(&own, IBV_WR_RDMA_READ, back, to - 1, 1);
			EQUAL(mine[back], 0);
			exchange(&own, IBV_WR_RDMA_READ, back, to + length, 1);
			exchange(&own, IBV_WR_RDMA_WRITE, SPACE - PAGE, to, length < PAGE ? length : PAGE);
			memset(mine + back, 0, length);
			for (uint32_t at = 0; at < length; at += 1 << 20)
				exchange(&own, IBV_WR_RDMA_WRITE, back, to + at,
					 length - at < 1 << 20 ? length - at : 1 << 20);
		}
		is_direct(!packets_forced());
	}
	meet(&own);
	release(&own);
}

/* Messages and immediate data are packets; what is posted around them stays in order. */
static void order_holds_with_messages_between(void)
{
	struct process own = fork_connected(USUAL);
	unsigned char *mine = space_of(&own);
	for (uint32_t round = 1; round <= ROUNDS; round++) {
		if (own.child) {
			memcpy(mine, &round, sizeof round);
			exchange(&own, IBV_WR_RDMA_WRITE, 0, 64, sizeof round);
			EQUAL(post(&own.side, (struct ibv_send_wr){ .opcode = IBV_WR_SEND }, 0, 8), 0);
			uint32_t next = ~round;
			memcpy(mine + 8, &next, sizeof next);
			struct ibv_sge sge = { (uintptr_t)mine + 8, sizeof next, own.space->lkey };
			struct ibv_send_wr wr = to_space(&own, IBV_WR_RDMA_WRITE, 128);
			wr.sg_list = &sge, wr.num_sge = 1;
			EQUAL(post(&own.side, wr, 0, 0), 0);
			EQUAL(expect(own.side.cq, IBV_WC_SUCCESS).opcode, IBV_WC_SEND);
			EQUAL(expect(own.side.cq, IBV_WC_SUCCESS).opcode, IBV_WC_RDMA_WRITE);
			await_other(&own);
		} else {
			EQUAL(post_receive(&own.side, round, 0, 64), 0);
			EQUAL(expect(own.side.cq, IBV_WC_SUCCESS).opcode, IBV_WC_RECV);
			EQUAL(*(volatile uint32_t *)(mine + 64), round);
			tell(&own);
		}
	}
	meet(&own);
	release(&own);
}

/* The first request is a packet, for the event that it raises. The send queue never runs empty, as in perftest. */
static void a_full_queue_to_a_peer_in_rtr_becomes_direct(void)
{
	enum { LENGTH = 40000, LEAST = 400, PLACES = 8 };
	struct options options = USUAL;
	options.child_stays_in_rtr = 1;
	struct process own = fork_connected(options);
	unsigned char *mine = space_of(&own);
	if (own.child) {
		uint64_t posted = 0, done = 0;
		int direct = packets_forced();
		/* Until one is direct, at once or after it was held: that depends on how soon the first ones are done. */
		while (!direct || done < LEAST || done < posted) {
			int more = !direct || posted < LEAST;
			while (more && posted < done + DEPTH) {
				unsigned char *bytes = mine + posted % DEPTH * LENGTH;
				memset(bytes, 1 + posted % 250, LENGTH);
				struct ibv_sge sge = { (uintptr_t)bytes, LENGTH, own.space->lkey };
				struct ibv_send_wr wr = to_space(&own, IBV_WR_RDMA_WRITE, posted % PLACES * LENGTH);
				wr.sg_list = &sge, wr.num_sge = 1, wr.wr_id = posted++;
				EQUAL(post(&own.side, wr, 0, 0), 0);
			}
			EQUAL(expect(own.side.cq, IBV_WC_SUCCESS).wr_id, done++);
			if (!direct && done % LEAST == 0)
				direct = strstr(explained(), "\"direct_writes\"") != NULL;
		}
		/* The last to land in each place is the last that was posted there. */
		for (uint64_t last = posted - PLACES; last < posted; last++) {
			exchange(&own, IBV_WR_RDMA_READ, SPACE / 2, last % PLACES * LENGTH, LENGTH);
			CHECK(all_are(mine + SPACE / 2, LENGTH, 1 + last % 250));
		}
		is_direct(!packets_forced());
	}
	meet(&own);
	if (own.child)
		return release(&own);
	struct ibv_async_event event;
	EQUAL(ibv_get_async_event(own.side.context, &event), 0);
	EQUAL(event.event_type, IBV_EVENT_COMM_EST);
	ibv_ack_async_event(&event);
	EQUAL(fcntl(own.side.context->async_fd, F_SETFL, O_NONBLOCK), 0);
	EQUAL(ibv_get_async_event(own.side.context, &event), -1);
	release(&own);
}

struct bad {
	enum ibv_wr_opcode opcode;
	long offset;
	uint32_t length, key;
	int space_access, qp_access;
	enum ibv_wc_status status;
};

static void bad_requests_end_as_with_packets(void)
{
	const int all = EVERY_ACCESS, both = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
	const int local = IBV_ACCESS_LOCAL_WRITE, reads = local | IBV_ACCESS_REMOTE_READ;
	const int writes = local | IBV_ACCESS_REMOTE_WRITE;
	const struct bad cases[] = {
		{ IBV_WR_RDMA_WRITE, 0, 8, 1, all, both, IBV_WC_REM_ACCESS_ERR },
		{ IBV_WR_RDMA_READ, 0, 8, 1, all, both, IBV_WC_REM_ACCESS_ERR },
		{ IBV_WR_RDMA_WRITE, -1, 8, 0, all, both, IBV_WC_REM_ACCESS_ERR },
		{ IBV_WR_RDMA_WRITE, SPACE - 7, 8, 0, all, both, IBV_WC_REM_ACCESS_ERR },
		{ IBV_WR_RDMA_READ, SPACE - 7, 8, 0, all, both, IBV_WC_REM_ACCESS_ERR },
		{ IBV_WR_RDMA_WRITE, 0, 8, 0, reads, both, IBV_WC_REM_ACCESS_ERR },
		{ IBV_WR_RDMA_READ, 0, 8, 0, writes, both, IBV_WC_REM_ACCESS_ERR },
		{ IBV_WR_RDMA_WRITE, 0, 8, 0, all, IBV_ACCESS_REMOTE_READ, IBV_WC_REM_INV_REQ_ERR },
		{ IBV_WR_RDMA_READ, 0, 8, 0, all, IBV_ACCESS_REMOTE_WRITE, IBV_WC_REM_INV_REQ_ERR },
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		const struct bad *bad = &cases[i];
		struct process own = fork_connected((struct options){ bad->space_access, bad->qp_access, 0, 0 });
		if (own.child) {
			struct ibv_send_wr wr = to_space(&own, bad->opcode, bad->offset);
			wr.wr.rdma.rkey ^= bad->key;
			EQUAL(post(&own.side, wr, 0, bad->length), 0);
			struct ibv_wc wc = completion(own.side.cq);
			if (wc.status != bad->status && wc.status != IBV_WC_REM_ACCESS_ERR)
				fprintf(stderr, "case %zu\n", i);
			CHECK(wc.status == bad->status || wc.status == IBV_WC_REM_ACCESS_ERR);
			EQUAL(state_of(own.side.qp), IBV_QPS_ERR);
		}
		meet(&own);
		CHECK(own.child || all_are(space_of(&own), PAGE, 0));
		release(&own);
	}
}

/* The other writes without a pause while the region, then the queue pair, is taken away. */
static void nothing_lands_after_it_was_taken_away(void)
{
	for (int how = 0; how < 3; how++) {
		struct process own = fork_connected(USUAL);
		unsigned char *mine = space_of(&own);
		if (!own.child) {
			struct ibv_wc wc = { 0 };
			memset(mine, 1, 1 << 16);
			struct ibv_sge sge = { (uintptr_t)mine, 1 << 16, own.space->lkey };
			struct ibv_send_wr wr = to_space(&own, IBV_WR_RDMA_WRITE, 0);
			wr.sg_list = &sge, wr.num_sge = 1;
			do {
				EQUAL(post(&own.side, wr, 0, 0), 0);
				wc = completion(own.side.cq);
			} while (wc.status == IBV_WC_SUCCESS);
			tell(&own);
			await_other(&own);
			release(&own);
		}
		while (!*(volatile unsigned char *)mine)
			;
		usleep(2000);
		if (how == 0)
			EQUAL(ibv_dereg_mr(own.space), 0);
		else
			EQUAL(set_state(own.side.qp, how == 1 ? IBV_QPS_ERR : IBV_QPS_RESET), 0);
		memset(mine, 0xee, 1 << 16);
		for (double end = seconds() + 0.1; seconds() < end;)
			CHECK(all_are(mine, 1 << 16, 0xee));
		await_other(&own);
		CHECK(all_are(mine, 1 << 16, 0xee));
		tell(&own);
		if (how == 0)
			CHECK(own.space = ibv_reg_mr(own.side.pd, mine, SPACE, EVERY_ACCESS));
		release(&own);
	}
}

static void a_peer_that_is_killed_is_an_error_soon(void)
{
	struct process own = fork_connected(USUAL);
	while (!own.child)
		pause();
	exchange(&own, IBV_WR_RDMA_WRITE, 0, 0, 8);
	EQUAL(kill(own.child, SIGKILL), 0);
	siginfo_t info;
	EQUAL(waitid(P_PID, own.child, &info, WEXITED | WNOWAIT), 0);
	double begun = seconds();
	EQUAL(post(&own.side, to_space(&own, IBV_WR_RDMA_WRITE, 0), 0, 8), 0);
	expect(own.side.cq, IBV_WC_RETRY_EXC_ERR);
	fprintf(stderr, "%s: an error after %.3f s\n", running, seconds() - begun);
	release(&own);
}

/* Its memory is there; its threads are not needed. */
static void a_stopped_peer_is_written_to_and_read(void)
{
	if (packets_forced())
		return;
	struct process own = fork_connected(USUAL);
	if (own.child) {
		int status;
		exchange(&own, IBV_WR_RDMA_WRITE, 0, 0, 8);
		is_direct(1);
		EQUAL(kill(own.child, SIGSTOP), 0);
		EQUAL(waitpid(own.child, &status, WUNTRACED), own.child);
		unsigned char *mine = space_of(&own);
		for (int round = 1; round < 200; round++) {
			memset(mine, round, 100);
			exchange(&own, IBV_WR_RDMA_WRITE, 0, 500, 100);
			exchange(&own, IBV_WR_RDMA_READ, 1000, 500, 100);
			CHECK(all_are(mine + 1000, 100, round));
		}
		EQUAL(kill(own.child, SIGCONT), 0);
	}
	meet(&own);
	release(&own);
}

static void another_user_is_reached_by_packets(void)
{
	if (geteuid() != 0)
		return;
	struct options options = USUAL;
	options.child_user = NOBODY;
	struct process own = fork_connected(options);
	unsigned char *mine = space_of(&own);
	memset(mine, own.child ? 3 : 4, 100);
	exchange(&own, IBV_WR_RDMA_WRITE, 0, 500, 100);
	meet(&own);
	CHECK(all_are(mine + 500, 100, own.child ? 4 : 3));
	is_direct(0);
	meet(&own);
	release(&own);
}

/* A child of either side has its own memory and no part in the connection. */
static void children_stay_out_of_it(void)
{
	struct process own = fork_connected(USUAL);
	unsigned char *mine = space_of(&own);
	EQUAL(ibv_is_fork_initialized(), memory_is_shared() ? IBV_FORK_ENABLED : IBV_FORK_UNNEEDED);
	meet(&own);
	pid_t extra = fork();
	CHECK(extra >= 0);
	if (!extra) {
		struct ibv_send_wr wr = to_space(&own, IBV_WR_RDMA_WRITE, 500);
		int refused = post(&own.side, wr, 0, 8) != 0;
		usleep(200000);
		if (memory_is_shared()) /* It would be the parent's. */
			_exit(!refused || msync(mine, PAGE, MS_ASYNC) == 0 || errno != ENOMEM);
		_exit(!refused || mine[700] != 0);
	}
	meet(&own);
	memset(mine, 9, 100);
	exchange(&own, IBV_WR_RDMA_WRITE, 0, 700, 100);
	meet(&own);
	CHECK(all_are(mine + 700, 100, 9));
	int status;
	EQUAL(waitpid(extra, &status, 0), extra);
	EQUAL(status, 0);
	meet(&own);
	release(&own);
}

/* What polls the last byte of a WRITE sees all of it. */
static void the_last_byte_comes_last(void)
{
	struct process own = fork_connected(USUAL);
	unsigned char *mine = space_of(&own);
	for (int round = 1; round <= ROUNDS; round++) {
		size_t length = 1 + (size_t)round * 131 % 9000;
		unsigned char value = 1 + round % 250;
		if (own.child) {
			memset(mine, value, length);
			exchange(&own, IBV_WR_RDMA_WRITE, 0, 16384 - length, length);
			await_other(&own);
		} else {
			while (*(volatile unsigned char *)(mine + 16383) != value)
				;
			__atomic_thread_fence(__ATOMIC_ACQUIRE);
			CHECK(all_are(mine + 16384 - length, length, value));
			tell(&own);
		}
	}
	meet(&own);
	release(&own);
}

/* `ptrace_scope` of Yama: -1 where the kernel has none. */
static int yama(void)
{
	int scope = -1;
	FILE *file = fopen("/proc/sys/kernel/yama/ptrace_scope", "r");
	if (file) {
		EQUAL(fscanf(file, "%d", &scope), 1);
		fclose(file);
	}
	return scope;
}

/* What the kernel answers a child that reads its parent's memory. */
static int reads_its_parent(void)
{
	static char here, there;
	struct iovec to = { &here, 1 }, from = { &there, 1 };
	return process_vm_readv(getppid(), &to, 1, &from, 1, 0) == 1 ? 0 : errno;
}

/* The child writes, since Yama always lets a process reach its descendants. Root may reach everybody. */
static void reach_the_parent_as_yama_allows(void)
{
	int scope = yama();
	pid_t stranger = fork();
	CHECK(stranger >= 0);
	if (!stranger)
		_exit(reads_its_parent());
	int status;
	EQUAL(waitpid(stranger, &status, 0), stranger);
	EQUAL(WEXITSTATUS(status), scope >= 1 ? EPERM : 0);
	struct process own = fork_connected(USUAL);
	unsigned char *mine = space_of(&own);
	if (!own.child) {
		memset(mine, 7, 100);
		exchange(&own, IBV_WR_RDMA_WRITE, 0, 500, 100);
		exchange(&own, IBV_WR_RDMA_READ, 1000, 500, 100);
		CHECK(all_are(mine + 1000, 100, 7));
		is_direct(!packets_forced() && scope < 2);
		const char *path = strstr(explained(), "\"path\":\"");
		CHECK(path);
		path += strlen("\"path\":\"");
		if (!packets_forced() && scope >= 2)
			EQUAL(strncmp(path, "packets in shared memory: ", 26), 0);
		printf("ptrace_scope %d: %.*s\n", scope, (int)strcspn(path, "\""), path);
		fflush(stdout);
	}
	meet(&own);
	CHECK(own.child == 0 || all_are(mine + 500, 100, 7));
	release(&own);
}

static void yama_decides_who_is_reached_directly(void)
{
	pid_t child = fork();
	CHECK(child >= 0);
	if (!child) {
		alarm(CASE_LIMIT_S);
		if (geteuid() == 0)
			EQUAL(setresuid(NOBODY, NOBODY, NOBODY), 0);
		/* A change of user makes memory unreachable. */
		EQUAL(prctl(PR_SET_DUMPABLE, 1), 0);
		reach_the_parent_as_yama_allows();
		_exit(0);
	}
	int status;
	EQUAL(waitpid(child, &status, 0), child);
	EQUAL(status, 0);
}

int main(int argc, char **argv)
{
	static const struct test cases[] = {
		CASE(bytes_arrive_and_no_others_change),
		CASE(order_holds_with_messages_between),
		CASE(a_full_queue_to_a_peer_in_rtr_becomes_direct),
		CASE(bad_requests_end_as_with_packets),
		CASE(nothing_lands_after_it_was_taken_away),
		CASE(a_peer_that_is_killed_is_an_error_soon),
		CASE(a_stopped_peer_is_written_to_and_read),
		CASE(another_user_is_reached_by_packets),
		CASE(children_stay_out_of_it),
		CASE(the_last_byte_comes_last),
		CASE(yama_decides_who_is_reached_directly),
	};
	return RUN(cases, argc, argv);
}
