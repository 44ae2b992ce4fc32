/*
 * wire_cases: operations that the usual test programs do not use, between two RDMA devices, each checked on
 * both sides. One operation per run, one pair of queue pairs per operation.
 *
 *   wire_cases -d DEVICE -g GID_INDEX -p TCP_PORT CASE            the responder
 *   wire_cases -d DEVICE -g GID_INDEX -p TCP_PORT CASE ADDRESS    the requester
 *
 * Exit status: 0 when every completion is the expected one and the bytes are right.
 * Build: cc -O2 -o wire_cases wire_cases.c -libverbs
 */
#include <arpa/inet.h>
#include <endian.h>
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { QKEY = 0x11112222, GRH = 40, BUFFER = 8192, LONG = 3000, SHORT = 22, DEPTH = 16, LIMIT_S = 10, RNR_PAUSE_US = 60000, ORDER_ROUNDS = 500 };

/* Sent to the other side before connecting. `window` is the key of a memory window, if any. */
struct card {
	uint32_t qpn, psn, key, window;
	uint64_t address;
	union ibv_gid gid;
};

struct side {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq, *recv_cq; /* the order of completions of two queues is undefined */
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	struct ibv_mw *mw;
	unsigned char *buffer;
	struct card mine, theirs;
	int tcp, gid_index;
};

#define MUST(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "line %d: " #condition " does not hold\n", __LINE__); \
			exit(1); \
		} \
	} while (0)

static unsigned char pattern(size_t at, int seed)
{
	return (unsigned char)(at * 7 + (at >> 8) + seed);
}

static void fill(unsigned char *bytes, size_t length, int seed)
{
	for (size_t at = 0; at < length; at++)
		bytes[at] = pattern(at, seed);
}

static int holds(const unsigned char *bytes, size_t length, int seed)
{
	for (size_t at = 0; at < length; at++)
		if (bytes[at] != pattern(at, seed))
			return 0;
	return 1;
}

/* ---- TCP: synchronization of the sides ------------------------------------------------------------- */

static int tcp_accept(const char *port)
{
	struct sockaddr_in6 any = { .sin6_family = AF_INET6, .sin6_port = htons(atoi(port)) };
	int listener = socket(AF_INET6, SOCK_STREAM, 0), on = 1;
	MUST(listener >= 0);
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
	MUST(!bind(listener, (struct sockaddr *)&any, sizeof any));
	MUST(!listen(listener, 1));
	int peer = accept(listener, NULL, NULL);
	MUST(peer >= 0);
	close(listener);
	return peer;
}

static int tcp_connect(const char *host, const char *port)
{
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *found;
	MUST(!getaddrinfo(host, port, &hints, &found));
	int peer = socket(found->ai_family, SOCK_STREAM, 0);
	MUST(peer >= 0);
	MUST(!connect(peer, found->ai_addr, found->ai_addrlen));
	freeaddrinfo(found);
	return peer;
}

static void swap_bytes(struct side *side, const void *mine, void *theirs, size_t length)
{
	MUST(write(side->tcp, mine, length) == (ssize_t)length);
	MUST(recv(side->tcp, theirs, length, MSG_WAITALL) == (ssize_t)length);
}

static void meet(struct side *side)
{
	char mine = 'x', theirs;
	swap_bytes(side, &mine, &theirs, 1);
}

/* ---- verbs: one connected queue pair ----------------------------------------------------------------- */

static struct ibv_context *open_device(const char *name)
{
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);
	MUST(list);
	for (int i = 0; i < count; i++)
		if (!strcmp(ibv_get_device_name(list[i]), name)) {
			struct ibv_context *context = ibv_open_device(list[i]);
			MUST(context);
			ibv_free_device_list(list);
			return context;
		}
	fprintf(stderr, "no device %s\n", name);
	exit(1);
}

static void create(struct side *side, const char *device, enum ibv_qp_type type)
{
	int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
		     IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND;
	side->context = open_device(device);
	MUST(side->pd = ibv_alloc_pd(side->context));
	MUST(side->cq = ibv_create_cq(side->context, 4 * DEPTH, NULL, NULL, 0));
	MUST(side->recv_cq = ibv_create_cq(side->context, 4 * DEPTH, NULL, NULL, 0));
	MUST(!posix_memalign((void **)&side->buffer, 4096, BUFFER));
	memset(side->buffer, 0, BUFFER);
	MUST(side->mr = ibv_reg_mr(side->pd, side->buffer, BUFFER, access));
	struct ibv_qp_init_attr init = {
		.send_cq = side->cq, .recv_cq = side->recv_cq, .qp_type = type, .sq_sig_all = 1,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	MUST(side->qp = ibv_create_qp(side->pd, &init));
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC };
	MUST(!ibv_modify_qp(side->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			    (type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)));
}

static void ready_datagrams(struct side *side)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .sq_psn = side->mine.psn };
	MUST(!ibv_modify_qp(side->qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	MUST(!ibv_modify_qp(side->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
}

static void connect_qp(struct side *side)
{
	struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = side->theirs.qpn,
		.rq_psn = side->theirs.psn, .max_dest_rd_atomic = 1, .min_rnr_timer = 20, /* 10.24 ms */
		.ah_attr = { .is_global = 1, .port_num = 1,
			     .grh = { .dgid = side->theirs.gid, .sgid_index = side->gid_index, .hop_limit = 64 } },
	};
	MUST(!ibv_modify_qp(side->qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
			    IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 17, .retry_cnt = 5, .rnr_retry = 7,
				   .sq_psn = side->mine.psn, .max_rd_atomic = 1 };
	MUST(!ibv_modify_qp(side->qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
			    IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

/* The next completion, whatever its status. */
static struct ibv_wc completion(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	time_t end = time(NULL) + LIMIT_S;
	int got;
	while (!(got = ibv_poll_cq(cq, 1, &wc)) && time(NULL) < end)
		;
	MUST(got == 1);
	return wc;
}

static void post(struct side *side, struct ibv_send_wr *wr, size_t length)
{
	struct ibv_sge piece = { (uintptr_t)side->buffer, length, side->mr->lkey };
	struct ibv_send_wr *bad;
	wr->sg_list = &piece;
	wr->num_sge = length ? 1 : 0;
	MUST(!ibv_post_send(side->qp, wr, &bad));
}

/* Posts, waits, and expects `status`. */
static void request(struct side *side, struct ibv_send_wr wr, size_t length, enum ibv_wc_status status)
{
	post(side, &wr, length);
	struct ibv_wc wc = completion(side->cq);
	if (wc.status != status)
		fprintf(stderr, "status: %s\n", ibv_wc_status_str(wc.status));
	MUST(wc.status == status);
}

static void post_recv(struct side *side, size_t length)
{
	struct ibv_sge piece = { (uintptr_t)side->buffer, length, side->mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &piece, .num_sge = 1 }, *bad;
	MUST(!ibv_post_recv(side->qp, &wr, &bad));
}

static struct ibv_wc received(struct side *side, enum ibv_wc_opcode opcode, size_t length)
{
	struct ibv_wc wc = completion(side->recv_cq);
	if (wc.status != IBV_WC_SUCCESS)
		fprintf(stderr, "status: %s\n", ibv_wc_status_str(wc.status));
	MUST(wc.status == IBV_WC_SUCCESS);
	MUST(wc.opcode == opcode);
	MUST(wc.byte_len == length);
	MUST(wc.qp_num == side->qp->qp_num);
	return wc;
}

/* ---- the cases: what the requester does, what the responder expects ------------------------------------ */

static struct ibv_send_wr remote(struct side *side, enum ibv_wr_opcode opcode, uint32_t key)
{
	struct ibv_send_wr wr = { .opcode = opcode,
				  .wr.rdma = { .remote_addr = side->theirs.address, .rkey = key } };
	return wr;
}

static const size_t LENGTHS[] = { LONG, SHORT, 0 };

static void write_imm_requester(struct side *side)
{
	for (int i = 0; i < 3; i++) {
		struct ibv_send_wr wr = remote(side, IBV_WR_RDMA_WRITE_WITH_IMM, side->theirs.key);
		wr.imm_data = htobe32(0xabcd0000 + i);
		fill(side->buffer, LENGTHS[i], i);
		request(side, wr, LENGTHS[i], IBV_WC_SUCCESS);
		meet(side);
	}
}

static void write_imm_responder(struct side *side)
{
	for (int i = 0; i < 3; i++) {
		struct ibv_wc wc = received(side, IBV_WC_RECV_RDMA_WITH_IMM, LENGTHS[i]);
		MUST(wc.wc_flags & IBV_WC_WITH_IMM);
		MUST(be32toh(wc.imm_data) == 0xabcd0000u + i);
		MUST(holds(side->buffer, LENGTHS[i], i));
		meet(side);
	}
}

static void send_imm_requester(struct side *side)
{
	for (int i = 0; i < 3; i++) {
		struct ibv_send_wr wr = { .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = htobe32(0x1234 + i),
					  .send_flags = IBV_SEND_SOLICITED };
		fill(side->buffer, LENGTHS[i], i);
		request(side, wr, LENGTHS[i], IBV_WC_SUCCESS);
		meet(side);
	}
}

static void send_imm_responder(struct side *side)
{
	for (int i = 0; i < 3; i++) {
		struct ibv_wc wc = received(side, IBV_WC_RECV, LENGTHS[i]);
		MUST(wc.wc_flags & IBV_WC_WITH_IMM);
		MUST(be32toh(wc.imm_data) == 0x1234u + i);
		MUST(holds(side->buffer, LENGTHS[i], i));
		meet(side);
	}
}

/* Binds the window to the whole buffer through the queue pair and tells the requester its key. */
static void bind_window(struct side *side, uint32_t key)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_BIND_MW }, *bad;
	wr.bind_mw.mw = side->mw;
	wr.bind_mw.rkey = key;
	wr.bind_mw.bind_info = (struct ibv_mw_bind_info){
		.mr = side->mr, .addr = (uintptr_t)side->buffer, .length = BUFFER,
		.mw_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };
	MUST(!ibv_post_send(side->qp, &wr, &bad));
	struct ibv_wc wc = completion(side->cq);
	MUST(wc.status == IBV_WC_SUCCESS);
	MUST(wc.opcode == IBV_WC_BIND_MW);
	side->mine.window = side->mw->rkey = key; /* the application keeps track of the key of a type 2 window */
	swap_bytes(side, &side->mine, &side->theirs, sizeof side->mine);
}

/* A WRITE through the window, then a SEND that invalidates it; after the last one, one more WRITE. */
static void send_inv_requester(struct side *side)
{
	for (int i = 0; i < 2; i++) {
		swap_bytes(side, &side->mine, &side->theirs, sizeof side->mine);
		fill(side->buffer, SHORT, 40 + i);
		request(side, remote(side, IBV_WR_RDMA_WRITE, side->theirs.window), SHORT, IBV_WC_SUCCESS);
		meet(side); /* the bytes have arrived */
		meet(side); /* they were checked: the next receive uses the same buffer */
		struct ibv_send_wr wr = { .opcode = IBV_WR_SEND_WITH_INV,
					  .invalidate_rkey = side->theirs.window };
		fill(side->buffer, LENGTHS[i], i);
		request(side, wr, LENGTHS[i], IBV_WC_SUCCESS);
		meet(side);
	}
	request(side, remote(side, IBV_WR_RDMA_WRITE, side->theirs.window), SHORT, IBV_WC_REM_ACCESS_ERR);
}

static void send_inv_responder(struct side *side)
{
	MUST(side->mw = ibv_alloc_mw(side->pd, IBV_MW_TYPE_2));
	for (int i = 0; i < 2; i++) {
		bind_window(side, ibv_inc_rkey(side->mw->rkey));
		meet(side);
		MUST(holds(side->buffer, SHORT, 40 + i));
		meet(side);
		struct ibv_wc wc = received(side, IBV_WC_RECV, LENGTHS[i]);
		/* The flag is not checked: soft-RoCE reports it in bit 2, the library expects bit 3. */
		MUST(wc.invalidated_rkey == side->mine.window);
		MUST(holds(side->buffer, LENGTHS[i], i));
		meet(side);
	}
}

/*
 * A READ and a later WRITE, posted together and not fenced: the READ returns the bytes of the previous round.
 * The architecture allows others, but programs rely on these.
 */
static void read_order_requester(struct side *side)
{
	const size_t half = BUFFER / 2, lengths[] = { 8, half };
	for (int i = 0; i < 2 * ORDER_ROUNDS; i++) {
		size_t length = lengths[i % 2];
		fill(side->buffer, half, i);
		request(side, remote(side, IBV_WR_RDMA_WRITE, side->theirs.key), half, IBV_WC_SUCCESS);
		fill(side->buffer, half, i + 1);
		struct ibv_sge landing = { (uintptr_t)side->buffer + half, length, side->mr->lkey };
		struct ibv_sge source = { (uintptr_t)side->buffer, length, side->mr->lkey };
		struct ibv_send_wr overwrite = remote(side, IBV_WR_RDMA_WRITE, side->theirs.key), *bad;
		overwrite.sg_list = &source, overwrite.num_sge = 1;
		struct ibv_send_wr read = remote(side, IBV_WR_RDMA_READ, side->theirs.key);
		read.sg_list = &landing, read.num_sge = 1, read.next = &overwrite;
		MUST(!ibv_post_send(side->qp, &read, &bad));
		MUST(completion(side->cq).status == IBV_WC_SUCCESS);
		MUST(completion(side->cq).status == IBV_WC_SUCCESS);
		MUST(holds(side->buffer + half, length, i));
	}
}

static void nak_write_requester(struct side *side)
{
	request(side, remote(side, IBV_WR_RDMA_WRITE, side->theirs.key ^ 0x5500), LONG, IBV_WC_REM_ACCESS_ERR);
}

static void nak_read_requester(struct side *side)
{
	struct ibv_send_wr wr = remote(side, IBV_WR_RDMA_READ, side->theirs.key);
	wr.wr.rdma.remote_addr += BUFFER - 8; /* the last bytes are beyond the region */
	request(side, wr, SHORT, IBV_WC_REM_ACCESS_ERR);
}

static void nak_atomic_requester(struct side *side)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
				  .wr.atomic = { .remote_addr = side->theirs.address, .compare_add = 1,
						 .rkey = side->theirs.key ^ 0x5500 } };
	request(side, wr, 8, IBV_WC_REM_ACCESS_ERR);
}

/*
 * The receive buffer is too small for the message. The architecture demands "invalid request" and a length
 * error; soft-RoCE treats it as a malformed receive: "operational error" on both sides.
 */
static void nak_length_requester(struct side *side)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND };
	post(side, &wr, LONG);
	enum ibv_wc_status status = completion(side->cq).status;
	MUST(status == IBV_WC_REM_INV_REQ_ERR || status == IBV_WC_REM_OP_ERR);
}

static void nak_length_responder(struct side *side)
{
	enum ibv_wc_status status = completion(side->recv_cq).status;
	MUST(status == IBV_WC_LOC_LEN_ERR || status == IBV_WC_LOC_QP_OP_ERR);
}

static void flushed_or_silent(struct side *side)
{
	(void)side; /* the requester checks its completion; receives may or may not be flushed by now */
}

/* The receive is posted only after the request was refused with RNR. */
static void rnr_requester(struct side *side)
{
	fill(side->buffer, SHORT, 9);
	request(side, (struct ibv_send_wr){ .opcode = IBV_WR_SEND }, SHORT, IBV_WC_SUCCESS);
}

static void rnr_responder(struct side *side)
{
	usleep(RNR_PAUSE_US);
	post_recv(side, BUFFER);
	received(side, IBV_WC_RECV, SHORT);
	MUST(holds(side->buffer, SHORT, 9));
}

/* A datagram to `to`; the reply arrives in the second half of the buffer. */
static void send_datagram(struct side *side, struct ibv_ah *to, uint32_t qpn, int seed)
{
	MUST(to);
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = htobe32(seed),
				  .wr.ud = { .ah = to, .remote_qpn = qpn, .remote_qkey = QKEY } };
	fill(side->buffer, SHORT, seed);
	request(side, wr, SHORT, IBV_WC_SUCCESS);
	MUST(!ibv_destroy_ah(to));
}

static void post_datagram_recv(struct side *side)
{
	struct ibv_sge piece = { (uintptr_t)side->buffer + BUFFER / 2, BUFFER / 2, side->mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &piece, .num_sge = 1 }, *bad;
	MUST(!ibv_post_recv(side->qp, &wr, &bad));
}

/* The area before the payload: an IPv6 header, or 20 bytes and an IPv4 header. */
static void check_grh(const struct side *side, const unsigned char *grh)
{
	for (int at = 0; at < GRH; at++)
		printf("%02x%s", grh[at], at == GRH - 1 ? " is the header area\n" : "");
	static const unsigned char MAPPED[12] = { [10] = 0xff, [11] = 0xff };
	const unsigned char *from = side->theirs.gid.raw, *to = side->mine.gid.raw;
	if (!memcmp(to, MAPPED, sizeof MAPPED)) {
		MUST(grh[20] == 0x45);
		MUST(grh[29] == IPPROTO_UDP);
		MUST(!memcmp(grh + 32, from + 12, 4));
		MUST(!memcmp(grh + 36, to + 12, 4));
	} else {
		MUST(grh[0] >> 4 == 6);
		MUST(grh[6] == IPPROTO_UDP || grh[6] == 0x1b);
		MUST(!memcmp(grh + 8, from, 16));
		MUST(!memcmp(grh + 24, to, 16));
	}
}

static struct ibv_wc received_datagram(struct side *side, int seed)
{
	const unsigned char *grh = side->buffer + BUFFER / 2;
	struct ibv_wc wc = received(side, IBV_WC_RECV, GRH + SHORT);
	MUST(wc.wc_flags & IBV_WC_GRH);
	MUST(wc.wc_flags & IBV_WC_WITH_IMM);
	MUST(be32toh(wc.imm_data) == (uint32_t)seed);
	MUST(wc.src_qp == side->theirs.qpn);
	MUST(holds(grh + GRH, SHORT, seed));
	check_grh(side, grh);
	return wc;
}

static void ud_requester(struct side *side)
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1,
		.grh = { .dgid = side->theirs.gid, .sgid_index = side->gid_index, .hop_limit = 64 } };
	send_datagram(side, ibv_create_ah(side->pd, &attr), side->theirs.qpn, 71);
	received_datagram(side, 72);
}

/* Replies to the address that the datagram carries. */
static void ud_responder(struct side *side)
{
	struct ibv_wc wc = received_datagram(side, 71);
	struct ibv_grh *grh = (struct ibv_grh *)(side->buffer + BUFFER / 2);
	send_datagram(side, ibv_create_ah_from_wc(side->pd, &wc, grh, 1), wc.src_qp, 72);
}

static const struct action {
	const char *name;
	void (*requester)(struct side *), (*responder)(struct side *);
	int receives;
	size_t room;
	enum ibv_qp_type type;
} ACTIONS[] = {
	{ "write_imm", write_imm_requester, write_imm_responder, 3, BUFFER, IBV_QPT_RC },
	{ "send_imm", send_imm_requester, send_imm_responder, 3, BUFFER, IBV_QPT_RC },
	{ "send_inv", send_inv_requester, send_inv_responder, 2, BUFFER, IBV_QPT_RC },
	{ "read_order", read_order_requester, flushed_or_silent, 0, 0, IBV_QPT_RC },
	{ "nak_write", nak_write_requester, flushed_or_silent, 1, BUFFER, IBV_QPT_RC },
	{ "nak_read", nak_read_requester, flushed_or_silent, 1, BUFFER, IBV_QPT_RC },
	{ "nak_atomic", nak_atomic_requester, flushed_or_silent, 1, BUFFER, IBV_QPT_RC },
	{ "nak_length", nak_length_requester, nak_length_responder, 1, SHORT, IBV_QPT_RC },
	{ "rnr", rnr_requester, rnr_responder, 0, 0, IBV_QPT_RC },
	{ "ud", ud_requester, ud_responder, 0, 0, IBV_QPT_UD },
};

static const struct action *action_named(const char *name)
{
	for (size_t i = 0; i < sizeof ACTIONS / sizeof *ACTIONS; i++)
		if (!strcmp(ACTIONS[i].name, name))
			return &ACTIONS[i];
	fprintf(stderr, "no case %s\n", name);
	exit(2);
}

static void introduce(struct side *side)
{
	srand(getpid() ^ time(NULL));
	side->mine = (struct card){ .qpn = side->qp->qp_num, .psn = rand() & 0xffffff, .key = side->mr->rkey,
				    .address = (uintptr_t)side->buffer };
	MUST(!ibv_query_gid(side->context, 1, side->gid_index, &side->mine.gid));
	swap_bytes(side, &side->mine, &side->theirs, sizeof side->mine);
}

static void destroy(struct side *side)
{
	MUST(!ibv_destroy_qp(side->qp));
	MUST(!side->mw || !ibv_dealloc_mw(side->mw));
	MUST(!ibv_dereg_mr(side->mr));
	MUST(!ibv_destroy_cq(side->cq));
	MUST(!ibv_destroy_cq(side->recv_cq));
	MUST(!ibv_dealloc_pd(side->pd));
	MUST(!ibv_close_device(side->context));
}

int main(int argc, char **argv)
{
	struct side side = { .tcp = -1 };
	const char *device = "", *port = "18600";
	for (int option; (option = getopt(argc, argv, "d:g:p:")) != -1;) {
		if (option == 'd') device = optarg;
		else if (option == 'g') side.gid_index = atoi(optarg);
		else if (option == 'p') port = optarg;
		else return 2;
	}
	MUST(optind < argc);
	const struct action *action = action_named(argv[optind]);
	const char *host = argv[optind + 1];
	create(&side, device, action->type);
	side.tcp = host ? tcp_connect(host, port) : tcp_accept(port);
	introduce(&side);
	action->type == IBV_QPT_UD ? ready_datagrams(&side) : connect_qp(&side);
	if (action->type == IBV_QPT_UD)
		post_datagram_recv(&side);
	for (int i = 0; !host && i < action->receives; i++)
		post_recv(&side, action->room);
	meet(&side);
	(host ? action->requester : action->responder)(&side);
	meet(&side);
	destroy(&side);
	printf("%s: as expected\n", action->name);
	return 0;
}
