/* Two processes whose threads connect at the same time, and sleep on completion channels while others poll. */
#define _GNU_SOURCE
#include "kit.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>

enum { THREADS = 4, SPACE = 16 << 20, MESSAGES = 300, ROUNDS = 12 };

/* What both processes see. */
struct common {
	atomic_int arrived[8];
	uint32_t qpn[2][THREADS], rkey[2][THREADS];
	unsigned char *space[2][THREADS];
};

/* One thread of one process: a queue pair, and a channel if it sleeps. */
struct lane {
	struct common *common;
	struct side side;
	struct ibv_comp_channel *channel;
	struct ibv_mr *mr;
	unsigned char *space;
	int process, index, sleeps;
	int armed; /* and makes no call between the next request and its completion */
	uint32_t sent, received; /* completions */
	void (*work)(struct lane *);
	pthread_t thread;
};

/* Waits until all threads of both processes are here, each time at another place. */
static void gather(struct common *common, int place, int threads)
{
	atomic_fetch_add(&common->arrived[place], 1);
	while (atomic_load(&common->arrived[place]) < threads)
		usleep(20);
}

static void make_lane(struct lane *lane, struct ibv_context *context)
{
	CHECK(lane->channel = ibv_create_comp_channel(context));
	lane->side = make_parts(context, lane->channel);
	struct ibv_qp_init_attr init = plan(lane->side.cq, IBV_QPT_RC);
	CHECK(lane->side.qp = ibv_create_qp(lane->side.pd, &init));
	lane->space = mmap(NULL, SPACE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(lane->space != MAP_FAILED);
	CHECK(lane->mr = ibv_reg_mr(lane->side.pd, lane->space, SPACE, EVERY_ACCESS));
	to_init(lane->side.qp);
	lane->common->qpn[lane->process][lane->index] = lane->side.qp->qp_num;
	lane->common->rkey[lane->process][lane->index] = lane->mr->rkey;
	lane->common->space[lane->process][lane->index] = lane->space;
}

static void destroy_lane(struct lane *lane)
{
	EQUAL(ibv_dereg_mr(lane->mr), 0);
	munmap(lane->space, SPACE);
	destroy_side(&lane->side);
	EQUAL(ibv_destroy_comp_channel(lane->channel), 0);
}

static void sleep_for_an_event(struct lane *lane)
{
	struct ibv_cq *cq;
	void *context;
	EQUAL(ibv_get_cq_event(lane->channel, &cq, &context), 0);
	ibv_ack_cq_events(cq, 1);
}

/* Takes completions until so many sends and receives have completed. */
static void await_done(struct lane *lane, uint32_t sent, uint32_t received)
{
	struct ibv_wc wc;
	if (lane->armed)
		sleep_for_an_event(lane);
	lane->armed = 0;
	for (int armed = 0; lane->sent < sent || lane->received < received;) {
		int got = ibv_poll_cq(lane->side.cq, 1, &wc);
		CHECK(got >= 0);
		if (got) {
			EQUAL(wc.status, IBV_WC_SUCCESS);
			*(wc.opcode & IBV_WC_RECV ? &lane->received : &lane->sent) += 1;
		} else if (lane->sleeps && !armed) {
			EQUAL(ibv_req_notify_cq(lane->side.cq, 0), 0);
			armed = 1;
		} else if (lane->sleeps) {
			sleep_for_an_event(lane);
			armed = 0;
		}
	}
}

/* The first half of the space is sent from, the second received into. */
static unsigned char *inbox(const struct lane *lane)
{
	return lane->space + SPACE / 2;
}

static void send_bytes(struct lane *lane, enum ibv_wr_opcode opcode, uint32_t length)
{
	int other = !lane->process;
	struct ibv_sge sge = { (uintptr_t)lane->space, length, lane->mr->lkey };
	struct ibv_send_wr wr = { .opcode = opcode, .sg_list = &sge, .num_sge = 1 };
	wr.wr.rdma.remote_addr = (uintptr_t)lane->common->space[other][lane->index] + SPACE / 2;
	wr.wr.rdma.rkey = lane->common->rkey[other][lane->index];
	EQUAL(post(&lane->side, wr, 0, 0), 0);
}

static void receive_bytes(struct lane *lane, uint32_t length)
{
	struct ibv_sge sge = { (uintptr_t)inbox(lane), length, lane->mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
	EQUAL(ibv_post_recv(lane->side.qp, &wr, &bad), 0);
}

/* Small messages both ways, a few at a time. */
static void talk(struct lane *lane)
{
	for (int i = 0; i < DEPTH; i++)
		receive_bytes(lane, 64);
	gather(lane->common, 2, 2 * THREADS);
	for (uint32_t sent = 0; sent < MESSAGES; sent++) {
		if (sent >= DEPTH / 2)
			await_done(lane, sent - DEPTH / 2 + 1, 0);
		send_bytes(lane, IBV_WR_SEND, 64);
		if (sent + DEPTH < MESSAGES) {
			await_done(lane, 0, sent + 1);
			receive_bytes(lane, 64);
		}
	}
	await_done(lane, MESSAGES, MESSAGES);
}

/* One message after the other, of every size, by all ways that wake. */
static void take_turns(struct lane *lane)
{
	static const uint32_t lengths[] = { 8, 2048, 4096, 4097, 65536, 1 << 20, (4 << 20) + 1, 8 << 20 };
	static const enum ibv_wr_opcode opcodes[] = { IBV_WR_SEND, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_WRITE,
						      IBV_WR_RDMA_READ };
	uint32_t sent = 0, received = 0;
	gather(lane->common, 2, 2 * THREADS);
	for (int round = 0; round < ROUNDS; round++)
		for (size_t i = 0; i < 4 * sizeof lengths / sizeof *lengths; i++) {
			uint32_t length = lengths[i / 4];
			unsigned char value = round * 31 + i + 1;
			receive_bytes(lane, 64 << 10 > length ? 64 << 10 : length);
			for (int turn = 0; turn < 2; turn++)
				if (turn == lane->process) {
					memset(lane->space, value, length);
					/* Every completion was taken: the next event is of this request. */
					if (lane->sleeps && round % 2) {
						EQUAL(ibv_req_notify_cq(lane->side.cq, 0), 0);
						lane->armed = 1;
					}
					send_bytes(lane, opcodes[i % 4], length);
					await_done(lane, ++sent, 0);
					if (opcodes[i % 4] == IBV_WR_RDMA_READ)
						CHECK(all_are(lane->space, length, value - 1));
					if (i % 4 < 2)
						continue;
					/* The other learns of it by a message. */
					send_bytes(lane, IBV_WR_SEND, 0);
					await_done(lane, ++sent, 0);
				} else {
					await_done(lane, 0, ++received);
					if (opcodes[i % 4] != IBV_WR_RDMA_READ)
						CHECK(all_are(inbox(lane), length, value));
				}
		}
}

/* Long messages one way, as many at a time as fit. */
static void pour(struct lane *lane)
{
	enum { LENGTH = 64 << 10 };
	if (lane->process)
		for (int i = 0; i < DEPTH; i++)
			receive_bytes(lane, LENGTH);
	gather(lane->common, 2, 2 * THREADS);
	for (uint32_t i = 0; i < MESSAGES; i++)
		if (!lane->process) {
			if (i >= DEPTH)
				await_done(lane, i - DEPTH + 1, 0);
			send_bytes(lane, IBV_WR_SEND, LENGTH);
		} else {
			await_done(lane, 0, i + 1);
			if (i + DEPTH < MESSAGES)
				receive_bytes(lane, LENGTH);
		}
	if (!lane->process)
		await_done(lane, MESSAGES, 0);
}

/* Many small requests at once, WRITEs and SENDs by turns, or SENDs only: more than the other side takes before it sleeps. */
static void burst(struct lane *lane, int writes, uint32_t length)
{
	enum { MANY = 8, BURSTS = 20 };
	for (int i = 0; lane->process && i < MANY; i++)
		receive_bytes(lane, 4096);
	for (uint32_t round = 1; round <= BURSTS; round++) {
		gather(lane->common, 2, 2 * THREADS * round);
		usleep(2000);
		for (int i = 0; !lane->process && i < MANY; i++) {
			if (writes)
				send_bytes(lane, IBV_WR_RDMA_WRITE, length);
			send_bytes(lane, IBV_WR_SEND, writes ? 64 : length);
		}
		uint32_t done = round * MANY;
		await_done(lane, lane->process ? 0 : done * (1 + writes), lane->process ? done : 0);
		for (int i = 0; lane->process && round < BURSTS && i < MANY; i++)
			receive_bytes(lane, 4096);
	}
}

static void burst_of_both(struct lane *lane)
{
	burst(lane, 1, 4096);
}

static void burst_of_sends(struct lane *lane)
{
	burst(lane, 0, 4096);
}

static void *run_lane(void *arg)
{
	struct lane *lane = arg;
	gather(lane->common, 1, 2 * THREADS);
	to_rts(lane->side.qp, lane->common->qpn[!lane->process][lane->index]);
	lane->work(lane);
	gather(lane->common, 3, 2 * THREADS);
	return NULL;
}

/* All threads of two processes connect at once, and work; the first so many of each process poll, the others sleep. */
static void together(void (*work)(struct lane *), int polling)
{
	struct common *common = mmap(NULL, sizeof *common, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(common != MAP_FAILED);
	fflush(NULL);
	pid_t child = fork();
	CHECK(child >= 0);
	if (!child)
		EQUAL(prctl(PR_SET_PDEATHSIG, SIGKILL), 0);
	struct ibv_context *context = open_device();
	static struct lane lanes[THREADS];
	for (int i = 0; i < THREADS; i++) {
		lanes[i] = (struct lane){ .common = common, .process = !child, .index = i, .sleeps = i >= polling,
					  .work = work };
		make_lane(&lanes[i], context);
	}
	gather(common, 0, 2);
	for (int i = 0; i < THREADS; i++)
		EQUAL(pthread_create(&lanes[i].thread, NULL, run_lane, &lanes[i]), 0);
	for (int i = 0; i < THREADS; i++) {
		EQUAL(pthread_join(lanes[i].thread, NULL), 0);
		destroy_lane(&lanes[i]);
	}
	EQUAL(ibv_close_device(context), 0);
	if (!child)
		_exit(0);
	int status;
	EQUAL(waitpid(child, &status, 0), child);
	EQUAL(status, 0);
	munmap(common, sizeof *common);
}

static void threads_connect_at_once(void)
{
	for (int round = 0; round < 5; round++)
		together(talk, THREADS);
}

static void small_messages_wake_sleepers(void)
{
	together(talk, 0);
}

static void a_thread_that_polls_takes_nobodys_wake_up(void)
{
	together(talk, 1);
	together(pour, 1);
}

static void messages_of_every_size_wake_sleepers(void)
{
	together(take_turns, 0);
}

static void long_messages_wake_sleepers(void)
{
	together(pour, 0);
}

static void bursts_wake_sleepers_until_their_end(void)
{
	together(burst_of_both, 0);
	together(burst_of_sends, 0);
}

int main(int argc, char **argv)
{
	static const struct test cases[] = {
		CASE(threads_connect_at_once),
		CASE(small_messages_wake_sleepers),
		CASE(a_thread_that_polls_takes_nobodys_wake_up),
		CASE(messages_of_every_size_wake_sleepers),
		CASE(long_messages_wake_sleepers),
		CASE(bursts_wake_sleepers_until_their_end),
	};
	return RUN(cases, argc, argv);
}
