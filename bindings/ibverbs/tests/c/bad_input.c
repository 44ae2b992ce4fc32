/* Invalid use, and the resulting error: from the call, or as a completion. */
#include "kit.h"

static struct ibv_send_wr plain_send(void)
{
	return (struct ibv_send_wr){ .wr_id = 1, .opcode = IBV_WR_SEND };
}

static void both_to(struct pair *pair, enum ibv_qp_state state)
{
	EQUAL(set_state(pair->a.qp, state) | set_state(pair->b.qp, state), 0);
}

static void unknown_requests_are_refused(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct ibv_send_wr wr = plain_send(), *bad;
	for (int opcode = IBV_WR_TSO; opcode < 40; opcode++) {
		wr.opcode = opcode;
		EQUAL(post(&pair.a, wr, 0, 8), EINVAL);
	}
	wr.opcode = -1;
	EQUAL(post(&pair.a, wr, 0, 8), EINVAL);
	wr = plain_send();
	for (unsigned flag = IBV_SEND_IP_CSUM; flag; flag <<= 1) {
		wr.send_flags = IBV_SEND_SIGNALED | flag;
		EQUAL(post(&pair.a, wr, 0, 8), EINVAL);
	}
	wr = (struct ibv_send_wr){ .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD };
	wr.wr.atomic.remote_addr = (uintptr_t)pair.b.bytes;
	wr.wr.atomic.rkey = pair.b.mr->rkey;
	EQUAL(post(&pair.a, wr, 0, 16), EINVAL); /* atomics have eight bytes */
	wr = (struct ibv_send_wr){ .opcode = IBV_WR_LOCAL_INV };
	EQUAL(post(&pair.a, wr, 0, 8), EINVAL); /* invalidations have no list */
	EQUAL(ibv_post_send(pair.a.qp, NULL, &bad), 0); /* an empty list is valid */
	EQUAL(ibv_post_recv(pair.a.qp, NULL, (struct ibv_recv_wr **)&bad), 0);
	expect_nothing(pair.a.cq);
	destroy_pair(&pair);
}

static void lists_and_inline_data_have_their_limits(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct side *a = &pair.a;
	struct ibv_sge sges[3] = { piece(a, 0, 8), piece(a, 8, 8), piece(a, 16, 8) };
	struct ibv_send_wr wr = plain_send();
	struct ibv_recv_wr receive = { .sg_list = sges, .num_sge = 3 }, *bad = NULL;
	(wr.sg_list = sges, wr.num_sge = 3);
	EQUAL(post(a, wr, 0, 0), EINVAL);
	EQUAL(ibv_post_recv(a->qp, &receive, &bad), EINVAL);
	CHECK(bad == &receive);
	receive.num_sge = -1;
	EQUAL(ibv_post_recv(a->qp, &receive, &bad), EINVAL);
	receive = (struct ibv_recv_wr){ .num_sge = 2 };
	EQUAL(ibv_post_recv(a->qp, &receive, &bad), EINVAL);
	/* Each element fits, but their sum does not. */
	sges[0].length = sges[1].length = INLINE / 2 + 1;
	(wr.num_sge = 2, wr.send_flags = IBV_SEND_INLINE);
	EQUAL(post(a, wr, 0, 0), EINVAL);
	/* The sum exceeds the longest message. */
	sges[0].length = sges[1].length = 0xffffffff;
	wr.send_flags = 0;
	EQUAL(post(a, wr, 0, 0), EINVAL);
	/* A list stops at the refused request; the requests before it are posted. */
	struct ibv_send_wr list[3] = { plain_send(), plain_send(), plain_send() }, *refused = NULL;
	EQUAL(post_receive(&pair.b, 1, 0, 64), 0);
	(list[0].next = &list[1], list[1].next = &list[2], list[1].opcode = 99);
	EQUAL(ibv_post_send(a->qp, list, &refused), EINVAL);
	CHECK(refused == &list[1]);
	expect(a->cq, IBV_WC_SUCCESS);
	expect_nothing(a->cq);
	destroy_pair(&pair);
}

/* Wrong keys and lengths are detected on use. */
static void wrong_keys_end_the_request_that_has_them(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct side *a = &pair.a, *b = &pair.b;
	struct ibv_sge sge = piece(a, 0, 64);
	struct ibv_send_wr wr = plain_send();
	uint32_t keys[] = { 0, a->mr->lkey ^ 0x5500, a->mr->rkey, b->mr->lkey, 0xffffffff };
	(wr.sg_list = &sge, wr.num_sge = 1);
	for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
		sge.lkey = keys[i];
		EQUAL(post(a, wr, 0, 64), 0);
		EQUAL(expect(a->cq, IBV_WC_LOC_PROT_ERR).wr_id, 1);
		EQUAL(state_of(a->qp), IBV_QPS_ERR);
		both_to(&pair, IBV_QPS_RESET);
		connect_pair(a->qp, b->qp);
	}
	sge = piece(a, BYTES - 63, 64);
	EQUAL(post(a, wr, 0, 64), 0);
	expect(a->cq, IBV_WC_LOC_PROT_ERR);
	destroy_pair(&pair);
}

static void a_bad_receive_fails_both_sides(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct side *a = &pair.a, *b = &pair.b;
	struct ibv_sge sge = piece(b, 0, 64);
	struct ibv_recv_wr wr = { .wr_id = 4, .sg_list = &sge, .num_sge = 1 }, *bad;
	sge.lkey ^= 0x5500;
	EQUAL(ibv_post_recv(b->qp, &wr, &bad), 0);
	EQUAL(post(a, plain_send(), 0, 64), 0);
	expect(a->cq, IBV_WC_REM_OP_ERR);
	EQUAL(expect(b->cq, IBV_WC_LOC_PROT_ERR).wr_id, 4);
	both_to(&pair, IBV_QPS_RESET);
	connect_pair(a->qp, b->qp);
	EQUAL(post_receive(b, 5, 0, 63), 0);
	EQUAL(post(a, plain_send(), 0, 64), 0);
	expect(a->cq, IBV_WC_REM_INV_REQ_ERR);
	EQUAL(expect(b->cq, IBV_WC_LOC_LEN_ERR).wr_id, 5);
	destroy_pair(&pair);
}

/* Access that the queue pair does not allow is refused, whatever the key allows. */
static void a_queue_pair_without_rights_refuses(void)
{
	enum ibv_wr_opcode opcodes[] = { IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ };
	for (int i = 0; i < 2; i++) {
		struct pair pair = make_pair(IBV_QPT_RC);
		struct ibv_qp_attr attr = { .qp_access_flags = 0 };
		EQUAL(ibv_modify_qp(pair.b.qp, &attr, IBV_QP_ACCESS_FLAGS), 0);
		EQUAL(post(&pair.a, remote(opcodes[i], pair.b.bytes, pair.b.mr->rkey), 0, 64), 0);
		struct ibv_wc wc = completion(pair.a.cq);
		CHECK(wc.status == IBV_WC_REM_INV_REQ_ERR || wc.status == IBV_WC_REM_ACCESS_ERR);
		struct ibv_async_event event = next_event(pair.context);
		CHECK(event.event_type == IBV_EVENT_QP_REQ_ERR || event.event_type == IBV_EVENT_QP_ACCESS_ERR);
		CHECK(event.element.qp == pair.b.qp);
		destroy_pair(&pair);
	}
}

/* Retries end: without a receive, without an answer, and where no READ may be in flight. */
static void a_connection_gives_up(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct side *a = &pair.a, *b = &pair.b;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS, .sq_psn = 100, .timeout = 8, .retry_cnt = 1 };
	int mask = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
		   IBV_QP_MAX_QP_RD_ATOMIC;
	for (int answers = 1; answers >= 0; answers--) {
		both_to(&pair, IBV_QPS_RESET);
		to_init(a->qp);
		to_init(b->qp);
		to_rtr(a->qp, b->qp->qp_num);
		to_rtr(b->qp, a->qp->qp_num);
		if (!answers)
			EQUAL(set_state(b->qp, IBV_QPS_RESET), 0);
		EQUAL(ibv_modify_qp(a->qp, &attr, mask), 0);
		EQUAL(post(a, plain_send(), 0, 64), 0);
		expect(a->cq, answers ? IBV_WC_RNR_RETRY_EXC_ERR : IBV_WC_RETRY_EXC_ERR);
		EQUAL(state_of(a->qp), IBV_QPS_ERR);
	}
	both_to(&pair, IBV_QPS_RESET);
	to_init(a->qp);
	to_init(b->qp);
	to_rts(b->qp, a->qp->qp_num);
	to_rtr(a->qp, b->qp->qp_num);
	EQUAL(ibv_modify_qp(a->qp, &attr, mask), 0); /* max_rd_atomic is 0 */
	EQUAL(post(a, remote(IBV_WR_RDMA_READ, b->bytes, b->mr->rkey), 0, 64), 0);
	expect(a->cq, IBV_WC_LOC_QP_OP_ERR);
	destroy_pair(&pair);
}

static void full_queues_say_so(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	for (int i = 0; i < DEPTH; i++) /* without a receiver nothing completes */
		EQUAL(post(&pair.a, plain_send(), 0, 8), 0);
	EQUAL(post(&pair.a, plain_send(), 0, 8), ENOMEM);
	EQUAL(set_state(pair.a.qp, IBV_QPS_ERR), 0);
	for (int i = 0; i < DEPTH; i++)
		expect(pair.a.cq, IBV_WC_WR_FLUSH_ERR);
	for (int i = 0; i < DEPTH; i++)
		EQUAL(post_receive(&pair.b, i, 0, 8), 0);
	EQUAL(post_receive(&pair.b, 0, 0, 8), ENOMEM);
	destroy_pair(&pair);
}

/* Handles of every kind, used after destruction: their memory is kept, so nothing crashes. */
static void what_was_destroyed_is_refused(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct side a = pair.a;
	struct ibv_wc wc;
	struct ibv_async_event event = { .event_type = IBV_EVENT_QP_FATAL, .element.qp = a.qp };
	struct ibv_comp_channel *channel = ibv_create_comp_channel(pair.context);
	struct ibv_mw *mw = ibv_alloc_mw(a.pd, IBV_MW_TYPE_1);
	struct ibv_mw_bind bind = { .bind_info = { .mr = a.mr, .addr = (uintptr_t)a.bytes, .length = 8 } };
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init = plan(a.cq, IBV_QPT_RC);
	EQUAL(ibv_destroy_qp(a.qp) | ibv_dealloc_mw(mw) | ibv_destroy_comp_channel(channel), 0);
	EQUAL(ibv_destroy_qp(a.qp), EINVAL);
	EQUAL(ibv_query_qp(a.qp, &attr, 0, &init), EINVAL);
	EQUAL(set_state(a.qp, IBV_QPS_ERR), EINVAL);
	EQUAL(post(&a, plain_send(), 0, 8), EINVAL);
	EQUAL(post_receive(&a, 1, 0, 8), EINVAL);
	EQUAL(ibv_bind_mw(a.qp, mw, &bind), EINVAL);
	EQUAL(ibv_dealloc_mw(mw), EINVAL);
	EQUAL(ibv_destroy_comp_channel(channel), EINVAL);
	CHECK(!ibv_create_cq(pair.context, 4, NULL, channel, 0));
	EQUAL(errno, EINVAL);
	ibv_ack_async_event(&event);
	CHECK(!ibv_qp_to_qp_ex(a.qp));
	EQUAL(ibv_dereg_mr(a.mr), 0);
	EQUAL(ibv_dereg_mr(a.mr), EINVAL);
	EQUAL(ibv_rereg_mr(a.mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0), IBV_REREG_MR_ERR_INPUT);
	EQUAL(ibv_destroy_cq(a.cq), 0);
	EQUAL(ibv_destroy_cq(a.cq), EINVAL);
	EQUAL(ibv_resize_cq(a.cq, 4), EINVAL);
	EQUAL(ibv_req_notify_cq(a.cq, 0), EINVAL);
	CHECK(ibv_poll_cq(a.cq, 1, &wc) < 0);
	ibv_ack_cq_events(a.cq, 1);
	CHECK(!ibv_create_qp(a.pd, &init)); /* its queue is destroyed */
	EQUAL(errno, EINVAL);
	EQUAL(ibv_dealloc_pd(a.pd), 0);
	EQUAL(ibv_dealloc_pd(a.pd), EINVAL);
	CHECK(!ibv_reg_mr(a.pd, a.bytes, 8, 0));
	EQUAL(errno, EINVAL);
	free(a.bytes);
	destroy_side(&pair.b);
	EQUAL(ibv_close_device(pair.context), 0);
}

static void null_handles_are_refused(void)
{
	struct ibv_context *context = open_device();
	struct ibv_qp_init_attr init = plan(NULL, IBV_QPT_RC);
	struct ibv_pd *pd = ibv_alloc_pd(context);
	EQUAL(ibv_destroy_qp(NULL), EINVAL);
	EQUAL(ibv_destroy_cq(NULL), EINVAL);
	EQUAL(ibv_destroy_srq(NULL), EINVAL);
	EQUAL(ibv_destroy_ah(NULL), EINVAL);
	EQUAL(ibv_destroy_comp_channel(NULL), EINVAL);
	EQUAL(ibv_dealloc_pd(NULL), EINVAL);
	EQUAL(ibv_close_device(NULL), -1);
	CHECK(!ibv_create_qp(pd, &init) && !ibv_create_qp(pd, NULL));
	EQUAL(errno, EINVAL);
	CHECK(!ibv_create_srq(pd, NULL) && !ibv_create_cq(NULL, 4, NULL, NULL, 0));
	EQUAL(errno, EINVAL);
	struct ibv_cq *cq = ibv_create_cq(context, 4, NULL, NULL, 0);
	CHECK(ibv_poll_cq(cq, 1, NULL) < 0);
	CHECK(ibv_poll_cq(cq, -1, NULL) < 0);
	EQUAL(ibv_poll_cq(cq, 0, NULL), 0);
	EQUAL(ibv_destroy_cq(cq), 0);
	EQUAL(ibv_init_ah_from_wc(context, 1, NULL, NULL, NULL), -1);
	EQUAL(errno, EINVAL);
	ibv_ack_async_event(NULL);
	EQUAL(ibv_dealloc_pd(pd), 0);
	EQUAL(ibv_close_device(context), 0);
}

/* A domain cannot be freed while it contains an object of any kind. */
static void a_domain_with_children_stays(void)
{
	struct side side = make_parts(open_device(), NULL);
	EQUAL(ibv_dealloc_pd(side.pd), EBUSY);
	EQUAL(ibv_dereg_mr(side.mr), 0);
	side.mr = NULL;
	struct ibv_mw *mw = ibv_alloc_mw(side.pd, IBV_MW_TYPE_2);
	EQUAL(ibv_dealloc_pd(side.pd), EBUSY);
	EQUAL(ibv_dealloc_mw(mw), 0);
	struct ibv_srq_init_attr shared = { .attr = { .max_wr = 1, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(side.pd, &shared);
	EQUAL(ibv_dealloc_pd(side.pd), EBUSY);
	EQUAL(ibv_destroy_srq(srq), 0);
	struct ibv_qp_init_attr init = plan(side.cq, IBV_QPT_RC);
	struct ibv_qp *qp = ibv_create_qp(side.pd, &init);
	EQUAL(ibv_dealloc_pd(side.pd), EBUSY);
	EQUAL(ibv_destroy_qp(qp), 0);
	destroy_side(&side);
	EQUAL(ibv_close_device(side.context), 0);
}

/* Closing a device ends everything: outstanding work, unread events, windows, channels. */
static void a_device_may_be_closed_with_everything_open(void)
{
	for (int round = 0; round < 3; round++) {
		struct pair pair = make_pair(IBV_QPT_RC);
		struct ibv_mw *mw = ibv_alloc_mw(pair.b.pd, IBV_MW_TYPE_1);
		struct ibv_comp_channel *channel = ibv_create_comp_channel(pair.context);
		struct ibv_cq *cq = ibv_create_cq(pair.context, 4, NULL, channel, 0);
		struct ibv_mw_bind bind = { .bind_info = { .mr = pair.b.mr, .length = 64,
			.addr = (uintptr_t)pair.b.bytes, .mw_access_flags = IBV_ACCESS_REMOTE_WRITE } };
		EQUAL(ibv_bind_mw(pair.b.qp, mw, &bind), 0);
		CHECK(cq);
		for (int i = 0; i < 8; i++)
			EQUAL(post(&pair.a, remote(IBV_WR_RDMA_WRITE, pair.b.bytes, pair.b.mr->rkey), 0, BYTES), 0);
		EQUAL(set_state(pair.b.qp, IBV_QPS_ERR), 0);
		EQUAL(ibv_close_device(pair.context), 0);
		EQUAL(post(&pair.a, plain_send(), 0, 8), EINVAL);
		EQUAL(ibv_dereg_mr(pair.b.mr), EINVAL);
		EQUAL(ibv_dealloc_mw(mw), EINVAL);
		free(pair.a.bytes);
		free(pair.b.bytes);
	}
}

/* Objects of two devices cannot be combined. */
static void devices_do_not_mix(void)
{
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);
	CHECK(list);
	if (count < 2) {
		ibv_free_device_list(list);
		printf("(one device only) ");
		return;
	}
	struct ibv_context *other = ibv_open_device(list[0]);
	CHECK(other);
	ibv_free_device_list(list);
	struct side far = make_side(other, IBV_QPT_UD), ud = make_side(open_device(), IBV_QPT_UD);
	struct ibv_ah_attr attr = own_address(other);
	struct ibv_ah *ah = ibv_create_ah(far.pd, &attr);
	struct ibv_mw *mw = ibv_alloc_mw(far.pd, IBV_MW_TYPE_1), *own = ibv_alloc_mw(ud.pd, IBV_MW_TYPE_1);
	struct ibv_qp_init_attr init = plan(far.cq, IBV_QPT_RC);
	CHECK(ah && mw && own && !ibv_create_qp(ud.pd, &init));
	EQUAL(errno, EINVAL);
	to_init(ud.qp);
	to_rts(ud.qp, 0);
	struct ibv_send_wr wr = plain_send();
	(wr.wr.ud.ah = ah, wr.wr.ud.remote_qpn = 1);
	EQUAL(post(&ud, wr, 0, 8), EINVAL);

	init = plan(ud.cq, IBV_QPT_RC);
	struct ibv_qp *qp = ibv_create_qp(ud.pd, &init);
	to_init(qp);
	to_rts(qp, qp->qp_num);
	struct ibv_mw_bind bind = { .bind_info = { .mr = far.mr, .addr = (uintptr_t)far.bytes, .length = 8 } };
	EQUAL(ibv_bind_mw(qp, mw, &bind), EINVAL);
	EQUAL(ibv_destroy_qp(qp) | ibv_dealloc_mw(own) | ibv_dealloc_mw(mw) | ibv_destroy_ah(ah), 0);
	destroy_side(&far);
	destroy_side(&ud);
	EQUAL(ibv_close_device(other) | ibv_close_device(ud.context), 0);
}

int main(int argc, char **argv)
{
	static const struct test CASES[] = {
		CASE(unknown_requests_are_refused),
		CASE(lists_and_inline_data_have_their_limits),
		CASE(wrong_keys_end_the_request_that_has_them),
		CASE(a_bad_receive_fails_both_sides),
		CASE(a_queue_pair_without_rights_refuses),
		CASE(a_connection_gives_up),
		CASE(full_queues_say_so),
		CASE(what_was_destroyed_is_refused),
		CASE(null_handles_are_refused),
		CASE(a_domain_with_children_stays),
		CASE(a_device_may_be_closed_with_everything_open),
		CASE(devices_do_not_mix),
	};
	return RUN(CASES, argc, argv);
}
