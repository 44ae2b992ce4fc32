/*
 * Shared code of these programs: two queue pairs of one process connected over loopback, and checks that print
 * what failed. A program is a list of cases; without arguments it runs all of them, otherwise those named.
 *
 * Build one by hand: cc -o windows windows.c -libverbs -lpthread
 */
#ifndef KIT_H
#define KIT_H

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define HELPER static inline __attribute__((unused))

enum {
	BYTES = 1 << 16,  /* registered on each side */
	DEPTH = 16,       /* entries of each queue */
	INLINE = 128,     /* bytes of inline data */
	GRH = 40,         /* bytes in front of each datagram */
	QKEY = 0x1234,
	PATIENCE_S = 10,  /* for one completion */
	CASE_LIMIT_S = 30,
	SKIPPED = 77,
	EVERY_ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
		       IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND,
};

static const char *running = "";

#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "FAILED %s: %s:%d: %s (errno %d)\n", running, __FILE__, __LINE__, \
				#condition, errno); \
			exit(1); \
		} \
	} while (0)

/* Two numbers that must be equal; both are printed if they are not. */
#define EQUAL(got, wanted) \
	do { \
		long long got_ = (long long)(got), wanted_ = (long long)(wanted); \
		if (got_ != wanted_) { \
			fprintf(stderr, "FAILED %s: %s:%d: %s is %lld, not %s = %lld\n", running, __FILE__, \
				__LINE__, #got, got_, #wanted, wanted_); \
			exit(1); \
		} \
	} while (0)

/* The whole program cannot run here: exit status 77. */
HELPER void skip(const char *reason)
{
	printf("skipped %s: %s\n", running, reason);
	exit(SKIPPED);
}

struct test {
	const char *name;
	void (*run)(void);
};

#define CASE(name) { #name, name }
#define RUN(cases, argc, argv) run_cases(cases, sizeof(cases) / sizeof *(cases), argc, argv)

HELPER int run_cases(const struct test *cases, size_t count, int argc, char **argv)
{
	for (size_t i = 0; i < count; i++) {
		int wanted = argc < 2;
		for (int arg = 1; arg < argc; arg++)
			wanted |= !strcmp(argv[arg], cases[i].name);
		if (!wanted)
			continue;
		running = cases[i].name;
		alarm(CASE_LIMIT_S); /* a case that hangs has failed */
		cases[i].run();
		printf("ok %s\n", running);
		fflush(stdout);
	}
	return 0;
}

/* ---- one side: a queue pair and its resources -------------------------------------------------- */

struct side {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	unsigned char *bytes;
};

/* The last device: loopback. */
HELPER struct ibv_context *open_device(void)
{
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);
	CHECK(list && count > 0);
	struct ibv_context *context = ibv_open_device(list[count - 1]);
	CHECK(context);
	ibv_free_device_list(list);
	return context;
}

HELPER struct ibv_qp_init_attr plan(struct ibv_cq *cq, enum ibv_qp_type type)
{
	return (struct ibv_qp_init_attr){
		.send_cq = cq, .recv_cq = cq, .qp_type = type, .sq_sig_all = 1,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 2, .max_recv_sge = 2,
			 .max_inline_data = INLINE },
	};
}

/* Everything except the queue pair. */
HELPER struct side make_parts(struct ibv_context *context, struct ibv_comp_channel *channel)
{
	struct side side = { .context = context };
	CHECK(side.pd = ibv_alloc_pd(context));
	CHECK(side.cq = ibv_create_cq(context, 4 * DEPTH, NULL, channel, 0));
	CHECK(side.bytes = calloc(1, BYTES));
	CHECK(side.mr = ibv_reg_mr(side.pd, side.bytes, BYTES, EVERY_ACCESS));
	return side;
}

HELPER struct side make_side(struct ibv_context *context, enum ibv_qp_type type)
{
	struct side side = make_parts(context, NULL);
	struct ibv_qp_init_attr init = plan(side.cq, type);
	CHECK(side.qp = ibv_create_qp(side.pd, &init));
	return side;
}

HELPER void destroy_side(struct side *side)
{
	EQUAL(side->qp ? ibv_destroy_qp(side->qp) : 0, 0);
	EQUAL(side->mr ? ibv_dereg_mr(side->mr) : 0, 0);
	EQUAL(ibv_destroy_cq(side->cq), 0);
	EQUAL(ibv_dealloc_pd(side->pd), 0);
	free(side->bytes);
}

/* ---- states ------------------------------------------------------------------------------------- */

HELPER int set_state(struct ibv_qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = { .qp_state = state };
	return ibv_modify_qp(qp, &attr, IBV_QP_STATE);
}

HELPER void to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC };
	EQUAL(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			    (qp->qp_type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)), 0);
}

/* The address of this machine. */
HELPER struct ibv_ah_attr own_address(struct ibv_context *context)
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 1 } };
	EQUAL(ibv_query_gid(context, 1, 0, &attr.grh.dgid), 0);
	return attr;
}

HELPER void to_rtr(struct ibv_qp *qp, uint32_t dest)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = dest,
		.rq_psn = 100, .max_dest_rd_atomic = 4, .min_rnr_timer = 12,
		.ah_attr = own_address(qp->context) };
	int mask = IBV_QP_STATE;
	if (qp->qp_type != IBV_QPT_UD)
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	if (qp->qp_type == IBV_QPT_RC)
		mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	EQUAL(ibv_modify_qp(qp, &attr, mask), 0);
}

HELPER void to_rts(struct ibv_qp *qp, uint32_t dest)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS, .sq_psn = 100, .timeout = 14, .retry_cnt = 6,
				    .rnr_retry = 7, .max_rd_atomic = 4 };
	int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
	if (qp->qp_type == IBV_QPT_RC)
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	to_rtr(qp, dest);
	EQUAL(ibv_modify_qp(qp, &attr, mask), 0);
}

HELPER void connect_pair(struct ibv_qp *a, struct ibv_qp *b)
{
	to_init(a);
	to_init(b);
	to_rts(a, b->qp_num);
	to_rts(b, a->qp_num);
}

HELPER enum ibv_qp_state state_of(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	EQUAL(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init), 0);
	return attr.qp_state;
}

/* Two connected sides of one device. */
struct pair {
	struct ibv_context *context;
	struct side a, b;
};

HELPER struct pair make_pair(enum ibv_qp_type type)
{
	struct pair pair = { .context = open_device() };
	pair.a = make_side(pair.context, type);
	pair.b = make_side(pair.context, type);
	connect_pair(pair.a.qp, pair.b.qp);
	return pair;
}

/* Destroys a pair; no object may still be in use. */
HELPER void destroy_pair(struct pair *pair)
{
	destroy_side(&pair->a);
	destroy_side(&pair->b);
	EQUAL(ibv_close_device(pair->context), 0);
}

/* ---- work --------------------------------------------------------------------------------------- */

HELPER struct ibv_sge piece(const struct side *side, size_t offset, uint32_t length)
{
	return (struct ibv_sge){ (uintptr_t)side->bytes + offset, length, side->mr->lkey };
}

/* Posts one request; its list is `length` bytes from `offset` unless the request has one. */
HELPER int post(const struct side *side, struct ibv_send_wr wr, size_t offset, uint32_t length)
{
	struct ibv_sge sge = { 0 };
	struct ibv_send_wr *bad = NULL;
	if (length)
		sge = piece(side, offset, length);
	if (!wr.sg_list)
		wr.sg_list = &sge, wr.num_sge = length ? 1 : 0;
	int error = ibv_post_send(side->qp, &wr, &bad);
	CHECK(!error || bad == &wr);
	return error;
}

HELPER int post_receive(const struct side *side, uint64_t wr_id, size_t offset, uint32_t length)
{
	struct ibv_sge sge = piece(side, offset, length);
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1 }, *bad = NULL;
	int error = ibv_post_recv(side->qp, &wr, &bad);
	CHECK(!error || bad == &wr);
	return error;
}

HELPER struct ibv_send_wr remote(enum ibv_wr_opcode opcode, const void *address, uint32_t rkey)
{
	return (struct ibv_send_wr){ .opcode = opcode,
				     .wr.rdma = { .remote_addr = (uintptr_t)address, .rkey = rkey } };
}

HELPER double seconds(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

/* The next completion, whatever its status. */
HELPER struct ibv_wc completion(struct ibv_cq *cq)
{
	struct ibv_wc wc = { 0 };
	double end = seconds() + PATIENCE_S;
	int got;
	while (!(got = ibv_poll_cq(cq, 1, &wc)) && seconds() < end)
		;
	EQUAL(got, 1);
	return wc;
}

HELPER struct ibv_wc expect(struct ibv_cq *cq, enum ibv_wc_status status)
{
	struct ibv_wc wc = completion(cq);
	if (wc.status != status)
		fprintf(stderr, "%s: %s\n", running, ibv_wc_status_str(wc.status));
	EQUAL(wc.status, status);
	EQUAL(!wc.vendor_err, wc.status == IBV_WC_SUCCESS);
	return wc;
}

/* Nothing completes within the time that packets need to arrive. */
HELPER void expect_nothing(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	usleep(20000);
	EQUAL(ibv_poll_cq(cq, 1, &wc), 0);
}

HELPER int all_are(const unsigned char *bytes, size_t length, unsigned char value)
{
	for (size_t at = 0; at < length; at++)
		if (bytes[at] != value)
			return 0;
	return 1;
}

/* ---- events ------------------------------------------------------------------------------------- */

HELPER void set_nonblocking(int fd)
{
	EQUAL(fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK), 0);
}

HELPER int readable(int fd, int limit_ms)
{
	struct pollfd look = { .fd = fd, .events = POLLIN };
	return poll(&look, 1, limit_ms) == 1;
}

/* The counter of acknowledged events in the object of an event. */
HELPER uint32_t *completed_events(const struct ibv_async_event *event)
{
	if (event->event_type == IBV_EVENT_CQ_ERR)
		return &event->element.cq->async_events_completed;
	if (event->event_type == IBV_EVENT_SRQ_LIMIT_REACHED)
		return &event->element.srq->events_completed;
	return &event->element.qp->events_completed;
}

/* Waits for an asynchronous event and acknowledges it. */
HELPER struct ibv_async_event next_event(struct ibv_context *context)
{
	struct ibv_async_event event;
	CHECK(readable(context->async_fd, PATIENCE_S * 1000));
	EQUAL(ibv_get_async_event(context, &event), 0);
	uint32_t completed = *completed_events(&event);
	ibv_ack_async_event(&event);
	EQUAL(*completed_events(&event), completed + 1);
	return event;
}

#endif
