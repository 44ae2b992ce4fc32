/*
 * Traffic classes. The DSCP of every packet is that of its queue pair or address handle; what is on the wire is checked in
 * the capture of this process. MARKS_EXPECTED is the DSCP that the environment imposes, if any.
 */
#include "kit.h"

enum { CLASS = 26 << 2, OTHER_CLASS = 41 << 2 };

/* The traffic class that packets are to have where the program asks for this one. */
static int class_for(int asked)
{
	const char *imposed = getenv("MARKS_EXPECTED");
	return imposed ? atoi(imposed) << 2 : asked;
}

static struct ibv_ah_attr address_with(struct ibv_context *context, int index, int traffic_class)
{
	struct ibv_ah_attr attr = own_address(context);
	EQUAL(ibv_query_gid(context, 1, index, &attr.grh.dgid), 0);
	attr.grh.sgid_index = index;
	attr.grh.traffic_class = traffic_class;
	return attr;
}

static int class_of(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	EQUAL(ibv_query_qp(qp, &attr, IBV_QP_AV, &init), 0);
	return attr.ah_attr.grh.traffic_class;
}

static void to_rts_with(struct ibv_qp *qp, uint32_t dest, int index, int traffic_class)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = dest,
		.rq_psn = 100, .max_dest_rd_atomic = 4, .min_rnr_timer = 12,
		.ah_attr = address_with(qp->context, index, traffic_class) };
	int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	to_init(qp);
	if (qp->qp_type == IBV_QPT_RC)
		mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	EQUAL(ibv_modify_qp(qp, &attr, mask), 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .sq_psn = 100, .timeout = 14, .retry_cnt = 6,
				     .rnr_retry = 7, .max_rd_atomic = 4 };
	mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
	if (qp->qp_type == IBV_QPT_RC)
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	EQUAL(ibv_modify_qp(qp, &attr, mask), 0);
}

/* SENDs that wait for a receive, a WRITE, a READ and an atomic from a to b. */
static void exchange(struct side *a, struct side *b)
{
	struct ibv_send_wr send = { .opcode = IBV_WR_SEND };
	struct ibv_send_wr write = { .opcode = IBV_WR_RDMA_WRITE,
		.wr.rdma = { (uintptr_t)b->bytes, b->mr->rkey } };
	struct ibv_send_wr read = { .opcode = IBV_WR_RDMA_READ,
		.wr.rdma = { (uintptr_t)b->bytes, b->mr->rkey } };
	struct ibv_send_wr add = { .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
		.wr.atomic = { (uintptr_t)b->bytes, 1, 0, b->mr->rkey } };
	int is_reliable = a->qp->qp_type == IBV_QPT_RC;
	if (is_reliable) { /* a "receiver not ready" NAK first */
		EQUAL(post(a, send, 0, 5000), 0);
		usleep(20000);
		EQUAL(post_receive(b, 1, 0, 8192), 0);
		expect(a->cq, IBV_WC_SUCCESS);
		expect(b->cq, IBV_WC_SUCCESS);
	}
	EQUAL(post(a, write, 0, 60000), 0); /* long enough for a segmented send */
	expect(a->cq, IBV_WC_SUCCESS);
	if (is_reliable) {
		EQUAL(post(a, read, 0, 60000), 0);
		expect(a->cq, IBV_WC_SUCCESS);
		EQUAL(post(a, add, 0, 8), 0);
		expect(a->cq, IBV_WC_SUCCESS);
	}
	usleep(2000); /* until an unreliable WRITE has arrived */
}

static void connections(enum ibv_qp_type type, int index)
{
	struct ibv_context *context = open_device();
	struct side a = make_side(context, type), b = make_side(context, type);
	to_rts_with(a.qp, b.qp->qp_num, index, CLASS);
	to_rts_with(b.qp, a.qp->qp_num, index, CLASS);
	EQUAL(class_of(a.qp), class_for(CLASS));
	exchange(&a, &b);
	exchange(&b, &a);
	destroy_side(&a);
	destroy_side(&b);
	EQUAL(ibv_close_device(context), 0);
}

static void connections_of_ipv4(void)
{
	connections(IBV_QPT_RC, 0);
	connections(IBV_QPT_UC, 0);
}

/* The loopback device has ::1 behind 127.0.0.1 where the machine has IPv6. */
static void connections_of_ipv6(void)
{
	struct ibv_context *context = open_device();
	union ibv_gid gid;
	int has_v6 = !ibv_query_gid(context, 1, 1, &gid);
	EQUAL(ibv_close_device(context), 0);
	if (!has_v6)
		return;
	connections(IBV_QPT_RC, 1);
	connections(IBV_QPT_UC, 1);
}

/* A class that is changed while the send queue is drained holds from then on. */
static void a_class_that_changes(void)
{
	struct ibv_context *context = open_device();
	struct side a = make_side(context, IBV_QPT_RC), b = make_side(context, IBV_QPT_RC);
	to_rts_with(a.qp, b.qp->qp_num, 0, CLASS);
	to_rts_with(b.qp, a.qp->qp_num, 0, CLASS);
	EQUAL(set_state(a.qp, IBV_QPS_SQD), 0);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_SQD, .ah_attr = address_with(context, 0, OTHER_CLASS) };
	EQUAL(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE | IBV_QP_AV), 0);
	EQUAL(class_of(a.qp), class_for(OTHER_CLASS));
	EQUAL(set_state(a.qp, IBV_QPS_RTS), 0);
	EQUAL(post(&a, (struct ibv_send_wr){ .opcode = IBV_WR_RDMA_WRITE,
		.wr.rdma = { (uintptr_t)b.bytes, b.mr->rkey } }, 0, 100), 0);
	expect(a.cq, IBV_WC_SUCCESS);
	destroy_side(&a);
	destroy_side(&b);
	EQUAL(ibv_close_device(context), 0);
}

/* Each datagram has the class of its address handle, not that of its queue pair or of the datagram before. */
static void datagrams(void)
{
	struct pair pair = make_pair(IBV_QPT_UD);
	struct side *a = &pair.a, *b = &pair.b;
	struct ibv_ah *ahs[2];
	for (int i = 0; i < 2; i++) {
		struct ibv_ah_attr attr = address_with(pair.context, 0, i ? OTHER_CLASS : CLASS);
		CHECK(ahs[i] = ibv_create_ah(a->pd, &attr));
	}
	for (int i = 0; i < 8; i++) {
		EQUAL(post_receive(b, i, 4096 * (1 + i), 4096), 0);
		struct ibv_send_wr wr = { .opcode = IBV_WR_SEND,
			.wr.ud = { .ah = ahs[i % 2], .remote_qpn = b->qp->qp_num, .remote_qkey = QKEY } };
		EQUAL(post(a, wr, 0, 100), 0);
	}
	for (int i = 0; i < 8; i++) {
		expect(a->cq, IBV_WC_SUCCESS);
		struct ibv_wc wc = expect(b->cq, IBV_WC_SUCCESS);
		EQUAL(wc.byte_len, GRH + 100);
		EQUAL(wc.wr_id, i);
		/* The traffic class of the IPv4 header in the second half of the 40 bytes. */
		EQUAL(b->bytes[4096 * (1 + i) + 21] & ~3, class_for(i % 2 ? OTHER_CLASS : CLASS));
	}
	for (int i = 0; i < 2; i++)
		EQUAL(ibv_destroy_ah(ahs[i]), 0);
	destroy_pair(&pair);
}

/* What librdmacm does: the kernel hands out attributes with the type of service, and these become the queue pair's. */
struct kernel_route { uint8_t dgid[16]; uint32_t flow_label; uint8_t sgid_index, hop_limit, traffic_class, reserved; };
struct kernel_address { struct kernel_route grh; uint16_t dlid; uint8_t sl, src_path_bits, static_rate, is_global, port_num, reserved; };
void ibv_copy_ah_attr_from_kern(struct ibv_ah_attr *, struct kernel_address *);

static void classes_from_the_connection_manager(void)
{
	struct ibv_context *context = open_device();
	struct ibv_ah_attr own = own_address(context), attr;
	struct kernel_address kernel = { .is_global = 1, .port_num = 1,
		.grh = { .hop_limit = 1, .traffic_class = CLASS } };
	memcpy(kernel.grh.dgid, own.grh.dgid.raw, 16);
	ibv_copy_ah_attr_from_kern(&attr, &kernel);
	struct side side = make_side(context, IBV_QPT_RC);
	to_init(side.qp);
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = 7,
		.max_dest_rd_atomic = 4, .min_rnr_timer = 12, .ah_attr = attr };
	EQUAL(ibv_modify_qp(side.qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
			    IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), 0);
	EQUAL(class_of(side.qp), class_for(CLASS));
	destroy_side(&side);
	EQUAL(ibv_close_device(context), 0);
}

int main(int argc, char **argv)
{
	static const struct test cases[] = {
		CASE(connections_of_ipv4), CASE(connections_of_ipv6), CASE(a_class_that_changes), CASE(datagrams),
		CASE(classes_from_the_connection_manager),
	};
	return RUN(cases, argc, argv);
}
