/* The states of a queue pair: what may be posted in each, draining, and queries. */
#include "kit.h"

static struct ibv_send_wr plain_send(uint64_t wr_id)
{
	return (struct ibv_send_wr){ .wr_id = wr_id, .opcode = IBV_WR_SEND };
}

static void what_was_set_is_what_is_told(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	EQUAL(ibv_query_qp(pair.a.qp, &attr, IBV_QP_STATE | IBV_QP_CAP, &init), 0);
	EQUAL(attr.qp_state, IBV_QPS_RTS);
	EQUAL(attr.cur_qp_state, IBV_QPS_RTS);
	EQUAL(pair.a.qp->state, IBV_QPS_RTS);
	EQUAL(attr.path_mtu, IBV_MTU_1024);
	EQUAL(attr.dest_qp_num, pair.b.qp->qp_num);
	EQUAL(attr.rq_psn, 100);
	EQUAL(attr.sq_psn, 100);
	EQUAL(attr.qp_access_flags, IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
	EQUAL(attr.port_num, 1);
	EQUAL(attr.timeout, 14);
	EQUAL(attr.retry_cnt, 6);
	EQUAL(attr.rnr_retry, 7);
	EQUAL(attr.min_rnr_timer, 12);
	EQUAL(attr.max_rd_atomic, 4);
	EQUAL(attr.max_dest_rd_atomic, 4);
	EQUAL(attr.ah_attr.is_global, 1);
	EQUAL(attr.ah_attr.port_num, 1);
	EQUAL(attr.ah_attr.grh.hop_limit, 1);
	struct ibv_ah_attr own = own_address(pair.context);
	CHECK(!memcmp(&attr.ah_attr.grh.dgid, &own.grh.dgid, sizeof own.grh.dgid));
	EQUAL(attr.cap.max_send_wr, DEPTH);
	EQUAL(attr.cap.max_inline_data, INLINE);
	CHECK(init.send_cq == pair.a.cq && init.recv_cq == pair.a.cq && !init.srq);
	EQUAL(init.qp_type, IBV_QPT_RC);
	EQUAL(init.sq_sig_all, 1);
	EQUAL(init.cap.max_recv_sge, 2);
	EQUAL(ibv_query_qp(pair.a.qp, NULL, 0, &init), EINVAL);
	EQUAL(ibv_query_qp(NULL, &attr, 0, &init), EINVAL);
	destroy_pair(&pair);
}

static void posting_needs_the_right_state(void)
{
	struct ibv_context *context = open_device();
	struct side side = make_side(context, IBV_QPT_RC), peer = make_side(context, IBV_QPT_RC);
	EQUAL(post(&side, plain_send(1), 0, 8), EINVAL);
	EQUAL(post_receive(&side, 1, 0, 8), EINVAL); /* RESET accepts no work */
	to_init(side.qp);
	EQUAL(post(&side, plain_send(1), 0, 8), EINVAL);
	EQUAL(post_receive(&side, 2, 0, 8), 0);
	to_rtr(side.qp, peer.qp->qp_num);
	EQUAL(post(&side, plain_send(1), 0, 8), EINVAL);
	EQUAL(post_receive(&side, 3, 0, 8), 0);
	EQUAL(set_state(side.qp, IBV_QPS_ERR), 0);
	EQUAL(expect(side.cq, IBV_WC_WR_FLUSH_ERR).wr_id, 2);
	EQUAL(expect(side.cq, IBV_WC_WR_FLUSH_ERR).wr_id, 3);
	EQUAL(post(&side, plain_send(4), 0, 8), 0);
	EQUAL(expect(side.cq, IBV_WC_WR_FLUSH_ERR).wr_id, 4);
	EQUAL(post_receive(&side, 5, 0, 8), 0);
	EQUAL(expect(side.cq, IBV_WC_WR_FLUSH_ERR).wr_id, 5);
	EQUAL(set_state(side.qp, IBV_QPS_RESET), 0);
	EQUAL(post_receive(&side, 6, 0, 8), EINVAL);
	expect_nothing(side.cq);
	destroy_side(&side);
	destroy_side(&peer);
	EQUAL(ibv_close_device(context), 0);
}

static void wrong_transitions_change_nothing(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	EQUAL(ibv_modify_qp(pair.a.qp, &attr, IBV_QP_STATE | IBV_QP_PORT), EINVAL); /* RTS to INIT */
	EQUAL(set_state(pair.a.qp, IBV_QPS_SQE), EINVAL);
	EQUAL(set_state(pair.a.qp, 42), EINVAL);
	EQUAL(ibv_modify_qp(pair.a.qp, &attr, 1 << 30), EINVAL);
	EQUAL(ibv_modify_qp(pair.a.qp, NULL, IBV_QP_STATE), EINVAL);
	EQUAL(ibv_modify_qp(NULL, &attr, IBV_QP_STATE), EINVAL);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .cur_qp_state = IBV_QPS_SQD };
	EQUAL(ibv_modify_qp(pair.a.qp, &attr, IBV_QP_STATE | IBV_QP_CUR_STATE), EINVAL);
	EQUAL(state_of(pair.a.qp), IBV_QPS_RTS);
	EQUAL(set_state(pair.b.qp, IBV_QPS_RESET), 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT, .port_num = 2 };
	int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
	EQUAL(ibv_modify_qp(pair.b.qp, &attr, mask), EINVAL);
	attr.port_num = 1;
	attr.pkey_index = 1;
	EQUAL(ibv_modify_qp(pair.b.qp, &attr, mask), EINVAL);
	EQUAL(ibv_modify_qp(pair.b.qp, &attr, mask & ~IBV_QP_PORT), EINVAL); /* a required attribute is missing */
	EQUAL(state_of(pair.b.qp), IBV_QPS_RESET);
	destroy_pair(&pair);
}

/* Draining: begun requests finish, others wait, and an event reports the end. */
static void a_drained_send_queue_makes_an_event(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1 };
	EQUAL(post(&pair.a, plain_send(1), 0, 64), 0); /* the peer is not ready: stays unacknowledged */
	EQUAL(ibv_modify_qp(pair.a.qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
	CHECK(!readable(pair.context->async_fd, 20));
	EQUAL(post(&pair.a, plain_send(2), 0, 64), 0); /* is accepted, but not begun */
	EQUAL(post_receive(&pair.b, 1, 0, 64) | post_receive(&pair.b, 2, 64, 64), 0);
	EQUAL(expect(pair.a.cq, IBV_WC_SUCCESS).wr_id, 1);
	struct ibv_async_event event = next_event(pair.context);
	EQUAL(event.event_type, IBV_EVENT_SQ_DRAINED);
	CHECK(event.element.qp == pair.a.qp);
	EQUAL(expect(pair.b.cq, IBV_WC_SUCCESS).wr_id, 1);
	expect_nothing(pair.a.cq);
	EQUAL(state_of(pair.a.qp), IBV_QPS_SQD);

	attr = (struct ibv_qp_attr){ .timeout = 16 };
	EQUAL(ibv_modify_qp(pair.a.qp, &attr, IBV_QP_TIMEOUT), 0); /* attributes may change in SQD */
	EQUAL(set_state(pair.a.qp, IBV_QPS_RTS), 0);
	EQUAL(expect(pair.a.cq, IBV_WC_SUCCESS).wr_id, 2);
	EQUAL(expect(pair.b.cq, IBV_WC_SUCCESS).wr_id, 2);
	CHECK(!readable(pair.context->async_fd, 20));
	destroy_pair(&pair);
}

static void an_idle_send_queue_is_drained_at_once(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1 };
	EQUAL(ibv_modify_qp(pair.a.qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
	EQUAL(next_event(pair.context).event_type, IBV_EVENT_SQ_DRAINED);
	destroy_pair(&pair);
}

/* The first packet arrives before the connection is ready to send. */
static void the_first_packet_makes_an_event(void)
{
	struct ibv_context *context = open_device();
	struct pair pair = { context, make_side(context, IBV_QPT_RC), make_side(context, IBV_QPT_RC) };
	to_init(pair.a.qp);
	to_init(pair.b.qp);
	to_rts(pair.a.qp, pair.b.qp->qp_num);
	to_rtr(pair.b.qp, pair.a.qp->qp_num);
	EQUAL(post_receive(&pair.b, 1, 0, 64), 0);
	EQUAL(post(&pair.a, plain_send(1), 0, 64), 0);
	expect(pair.a.cq, IBV_WC_SUCCESS);
	struct ibv_async_event event = next_event(context);
	EQUAL(event.event_type, IBV_EVENT_COMM_EST);
	CHECK(event.element.qp == pair.b.qp);
	destroy_pair(&pair);
}

/* Connected to itself: some libraries read their own memory through the device to order writes. */
static void a_queue_pair_may_be_its_own_peer(void)
{
	struct ibv_context *context = open_device();
	struct side side = make_side(context, IBV_QPT_RC);
	to_init(side.qp);
	to_rts(side.qp, side.qp->qp_num);
	memset(side.bytes, 0x65, 64);
	EQUAL(post(&side, remote(IBV_WR_RDMA_WRITE, side.bytes + 4096, side.mr->rkey), 0, 64), 0);
	EQUAL(expect(side.cq, IBV_WC_SUCCESS).opcode, IBV_WC_RDMA_WRITE);
	CHECK(all_are(side.bytes + 4096, 64, 0x65));
	EQUAL(post(&side, remote(IBV_WR_RDMA_READ, side.bytes, side.mr->rkey), 8192, 64), 0);
	EQUAL(expect(side.cq, IBV_WC_SUCCESS).opcode, IBV_WC_RDMA_READ);
	CHECK(all_are(side.bytes + 8192, 64, 0x65));
	EQUAL(post_receive(&side, 9, 12288, 64), 0);
	EQUAL(post(&side, plain_send(8), 0, 64), 0);
	struct ibv_wc first = expect(side.cq, IBV_WC_SUCCESS), second = expect(side.cq, IBV_WC_SUCCESS);
	EQUAL(first.wr_id + second.wr_id, 8 + 9);
	CHECK(all_are(side.bytes + 12288, 64, 0x65));
	destroy_side(&side);
	EQUAL(ibv_close_device(context), 0);
}

/* An unreliable queue pair stops sending after an error, and resumes when set to RTS. */
static void a_failed_datagram_send_stops_the_send_queue(void)
{
	struct ibv_context *context = open_device();
	struct side a = make_side(context, IBV_QPT_UD);
	struct ibv_ah_attr attr = own_address(context);
	struct ibv_ah *ah = ibv_create_ah(a.pd, &attr);
	struct ibv_sge foreign = piece(&a, 0, 64);
	struct ibv_send_wr wr = plain_send(1);
	foreign.lkey ^= 0x5500;
	wr.wr.ud.ah = ah;
	to_init(a.qp);
	to_rts(a.qp, 0);
	(wr.sg_list = &foreign, wr.num_sge = 1);
	EQUAL(post(&a, wr, 0, 64), 0);
	expect(a.cq, IBV_WC_LOC_PROT_ERR);
	EQUAL(state_of(a.qp), IBV_QPS_SQE);
	EQUAL(post(&a, wr, 0, 64), 0);
	expect(a.cq, IBV_WC_WR_FLUSH_ERR);
	EQUAL(set_state(a.qp, IBV_QPS_RTS), 0);
	wr.sg_list = NULL;
	EQUAL(post(&a, wr, 0, 64), 0);
	expect(a.cq, IBV_WC_SUCCESS);
	EQUAL(ibv_destroy_ah(ah), 0);
	destroy_side(&a);
	EQUAL(ibv_close_device(context), 0);
}

int main(int argc, char **argv)
{
	static const struct test CASES[] = {
		CASE(what_was_set_is_what_is_told),
		CASE(posting_needs_the_right_state),
		CASE(wrong_transitions_change_nothing),
		CASE(a_drained_send_queue_makes_an_event),
		CASE(an_idle_send_queue_is_drained_at_once),
		CASE(the_first_packet_makes_an_event),
		CASE(a_queue_pair_may_be_its_own_peer),
		CASE(a_failed_datagram_send_stops_the_send_queue),
	};
	return RUN(CASES, argc, argv);
}
