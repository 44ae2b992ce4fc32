/* The extended interfaces: requests built by calls, completions read field by field. */
#include "kit.h"

static const uint64_t EVERY_OP = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM |
	IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
	IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_LOCAL_INV |
	IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_SEND_WITH_INV;

static struct ibv_qp_init_attr_ex plan_ex(const struct side *side, enum ibv_qp_type type, uint64_t ops)
{
	struct ibv_qp_init_attr old = plan(side->cq, type);
	return (struct ibv_qp_init_attr_ex){
		.send_cq = side->cq, .recv_cq = side->cq, .cap = old.cap, .qp_type = type, .pd = side->pd,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .send_ops_flags = ops };
}

/* A pair whose first side builds its requests by calls. */
static struct pair make_extended(enum ibv_qp_type type, uint64_t ops)
{
	struct ibv_context *context = open_device();
	struct pair pair = { context, make_parts(context, NULL), make_side(context, type) };
	struct ibv_qp_init_attr_ex init = plan_ex(&pair.a, type, ops);
	CHECK(pair.a.qp = ibv_create_qp_ex(context, &init));
	connect_pair(pair.a.qp, pair.b.qp);
	return pair;
}

static void begin(struct ibv_qp_ex *qp, uint64_t wr_id)
{
	ibv_wr_start(qp);
	qp->wr_id = wr_id;
	qp->wr_flags = IBV_SEND_SIGNALED;
}

static void finish(const struct side *side, enum ibv_wc_opcode opcode, uint64_t wr_id)
{
	EQUAL(ibv_wr_complete(ibv_qp_to_qp_ex(side->qp)), 0);
	struct ibv_wc wc = expect(side->cq, IBV_WC_SUCCESS);
	EQUAL(wc.opcode, opcode);
	EQUAL(wc.wr_id, wr_id);
}

static void one_sided_operations_move_bytes(void)
{
	struct pair pair = make_extended(IBV_QPT_RC, EVERY_OP);
	struct side *a = &pair.a, *b = &pair.b;
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(a->qp);
	CHECK(qp && !ibv_qp_to_qp_ex(b->qp)); /* created without the extended interface */
	uint64_t there = (uintptr_t)b->bytes, here = (uintptr_t)a->bytes;
	memset(a->bytes, 0x41, 32);
	memset(a->bytes + 32, 0x42, 32);
	begin(qp, 1);
	ibv_wr_rdma_write(qp, b->mr->rkey, there);
	struct ibv_sge two[2] = { piece(a, 32, 32), piece(a, 0, 32) };
	ibv_wr_set_sge_list(qp, 2, two);
	finish(a, IBV_WC_RDMA_WRITE, 1);
	CHECK(all_are(b->bytes, 32, 0x42) && all_are(b->bytes + 32, 32, 0x41));

	EQUAL(post_receive(b, 9, 4096, 64), 0);
	begin(qp, 2);
	ibv_wr_rdma_write_imm(qp, b->mr->rkey, there + 128, htobe32(77));
	struct ibv_data_buf pieces[2] = { { a->bytes, 16 }, { a->bytes + 32, 16 } };
	ibv_wr_set_inline_data_list(qp, 2, pieces);
	finish(a, IBV_WC_RDMA_WRITE, 2);
	struct ibv_wc wc = expect(b->cq, IBV_WC_SUCCESS);
	EQUAL(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
	EQUAL(wc.wc_flags, IBV_WC_WITH_IMM);
	EQUAL(be32toh(wc.imm_data), 77);
	EQUAL(wc.byte_len, 32);
	CHECK(all_are(b->bytes + 128, 16, 0x41) && all_are(b->bytes + 144, 16, 0x42));

	begin(qp, 3);
	ibv_wr_rdma_read(qp, b->mr->rkey, there + 128);
	ibv_wr_set_sge(qp, a->mr->lkey, here + 1024, 32);
	finish(a, IBV_WC_RDMA_READ, 3);
	CHECK(!memcmp(a->bytes + 1024, b->bytes + 128, 32));
	destroy_pair(&pair);
}

static void atomics_return_the_former_value(void)
{
	struct pair pair = make_extended(IBV_QPT_RC, EVERY_OP);
	struct side *a = &pair.a, *b = &pair.b;
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(a->qp);
	uint64_t *word = (uint64_t *)b->bytes, *result = (uint64_t *)a->bytes;
	uint64_t there = (uintptr_t)word;
	*word = 40;
	begin(qp, 1);
	ibv_wr_atomic_fetch_add(qp, b->mr->rkey, there, 2);
	ibv_wr_set_sge(qp, a->mr->lkey, (uintptr_t)result, 8);
	finish(a, IBV_WC_FETCH_ADD, 1);
	EQUAL(*result, 40);
	EQUAL(*word, 42);
	for (int matches = 0; matches < 2; matches++) {
		begin(qp, 2);
		ibv_wr_atomic_cmp_swp(qp, b->mr->rkey, there, matches ? 42 : 41, 7);
		ibv_wr_set_sge(qp, a->mr->lkey, (uintptr_t)result, 8);
		finish(a, IBV_WC_COMP_SWAP, 2);
		EQUAL(*result, 42);
		EQUAL(*word, matches ? 7 : 42);
	}
	begin(qp, 3);
	ibv_wr_atomic_fetch_add(qp, b->mr->rkey, there + 4, 2); /* misaligned */
	ibv_wr_set_sge(qp, a->mr->lkey, (uintptr_t)result, 8);
	EQUAL(ibv_wr_complete(qp), 0);
	expect(a->cq, IBV_WC_REM_INV_REQ_ERR);
	destroy_pair(&pair);
}

static void windows_are_bound_and_taken_away(void)
{
	struct pair pair = make_extended(IBV_QPT_RC, EVERY_OP);
	struct side *a = &pair.a, *b = &pair.b;
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(a->qp);
	struct ibv_mw *mw = ibv_alloc_mw(a->pd, IBV_MW_TYPE_2);
	uint32_t rkey = ibv_inc_rkey(mw->rkey);
	struct ibv_mw_bind_info info = { .mr = a->mr, .addr = (uintptr_t)a->bytes, .length = 64,
					 .mw_access_flags = IBV_ACCESS_REMOTE_WRITE };
	begin(qp, 1);
	ibv_wr_bind_mw(qp, mw, rkey, &info);
	finish(a, IBV_WC_BIND_MW, 1);
	memset(b->bytes, 0x43, 64);
	EQUAL(post(b, remote(IBV_WR_RDMA_WRITE, a->bytes, rkey), 0, 64), 0);
	expect(b->cq, IBV_WC_SUCCESS);
	CHECK(all_are(a->bytes, 64, 0x43));
	begin(qp, 2);
	ibv_wr_local_inv(qp, rkey);
	finish(a, IBV_WC_LOCAL_INV, 2);
	EQUAL(post(b, remote(IBV_WR_RDMA_WRITE, a->bytes, rkey), 0, 64), 0);
	expect(b->cq, IBV_WC_REM_ACCESS_ERR);
	EQUAL(ibv_dealloc_mw(mw), 0);
	destroy_pair(&pair);
}

static void datagrams_are_addressed_by_a_call(void)
{
	struct pair pair = make_extended(IBV_QPT_UD, IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM);
	struct side *a = &pair.a, *b = &pair.b;
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(a->qp);
	struct ibv_ah_attr attr = own_address(pair.context);
	struct ibv_ah *ah = ibv_create_ah(a->pd, &attr);
	EQUAL(post_receive(b, 1, 0, 4096), 0);
	memset(a->bytes, 0x44, 64);
	begin(qp, 1);
	ibv_wr_send_imm(qp, htobe32(5));
	ibv_wr_set_ud_addr(qp, ah, b->qp->qp_num, QKEY);
	ibv_wr_set_inline_data(qp, a->bytes, 64);
	finish(a, IBV_WC_SEND, 1);
	struct ibv_wc wc = expect(b->cq, IBV_WC_SUCCESS);
	EQUAL(wc.byte_len, GRH + 64);
	EQUAL(wc.src_qp, a->qp->qp_num);
	EQUAL(be32toh(wc.imm_data), 5);
	CHECK(all_are(b->bytes + GRH, 64, 0x44));

	begin(qp, 2);
	ibv_wr_send(qp); /* without a destination */
	ibv_wr_set_sge(qp, a->mr->lkey, (uintptr_t)a->bytes, 64);
	EQUAL(ibv_wr_complete(qp), EINVAL);
	begin(qp, 3);
	ibv_wr_rdma_write(qp, b->mr->rkey, (uintptr_t)b->bytes);
	ibv_wr_set_ud_addr(qp, ah, b->qp->qp_num, QKEY);
	EQUAL(ibv_wr_complete(qp), EINVAL);
	expect_nothing(a->cq);
	EQUAL(ibv_destroy_ah(ah), 0);
	destroy_pair(&pair);
}

static void a_bad_batch_posts_nothing(void)
{
	struct pair pair = make_extended(IBV_QPT_RC, EVERY_OP);
	struct side *a = &pair.a;
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(a->qp);
	begin(qp, 1);
	ibv_wr_set_sge(qp, a->mr->lkey, (uintptr_t)a->bytes, 8); /* without a request */
	EQUAL(ibv_wr_complete(qp), EINVAL);
	begin(qp, 2);
	ibv_wr_send(qp);
	ibv_wr_set_inline_data(qp, a->bytes, INLINE + 1);
	EQUAL(ibv_wr_complete(qp), EINVAL);
	begin(qp, 3);
	ibv_wr_send(qp);
	ibv_wr_set_inline_data_list(qp, 1, NULL);
	EQUAL(ibv_wr_complete(qp), EINVAL);
	begin(qp, 4);
	ibv_wr_send(qp);
	ibv_wr_set_sge_list(qp, 3, (struct ibv_sge[3]){ 0 }); /* the queue pair takes two */
	EQUAL(ibv_wr_complete(qp), EINVAL);
	begin(qp, 5);
	ibv_wr_bind_mw(qp, NULL, 1, &(struct ibv_mw_bind_info){ 0 });
	EQUAL(ibv_wr_complete(qp), EINVAL);
	begin(qp, 6);
	ibv_wr_send_tso(qp, a->bytes, 8, 100);
	EQUAL(ibv_wr_complete(qp), EOPNOTSUPP);
	begin(qp, 7);
	ibv_wr_send(qp);
	ibv_wr_abort(qp);
	begin(qp, 8);
	for (int i = 0; i <= DEPTH; i++)
		ibv_wr_send(qp); /* one more than the queue holds */
	EQUAL(ibv_wr_complete(qp), ENOMEM);
	expect_nothing(a->cq);

	EQUAL(post_receive(&pair.b, 1, 0, 64), 0); /* the queue pair still works */
	begin(qp, 9);
	ibv_wr_send(qp);
	finish(a, IBV_WC_SEND, 9);
	EQUAL(set_state(a->qp, IBV_QPS_RESET), 0);
	begin(qp, 10);
	ibv_wr_send(qp);
	EQUAL(ibv_wr_complete(qp), EINVAL); /* not in this state */
	destroy_pair(&pair);
}

static void what_cannot_be_had_is_not_made(void)
{
	struct side side = make_parts(open_device(), NULL);
	struct ibv_qp_init_attr_ex init = plan_ex(&side, IBV_QPT_RC, EVERY_OP | IBV_QP_EX_WITH_TSO);
	CHECK(!ibv_create_qp_ex(side.context, &init));
	EQUAL(errno, EOPNOTSUPP);
	init = plan_ex(&side, IBV_QPT_UD, IBV_QP_EX_WITH_RDMA_READ); /* not supported by UD */
	CHECK(!ibv_create_qp_ex(side.context, &init));
	EQUAL(errno, EOPNOTSUPP);
	init = plan_ex(&side, IBV_QPT_UC, IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD);
	CHECK(!ibv_create_qp_ex(side.context, &init));
	EQUAL(errno, EOPNOTSUPP);
	init = plan_ex(&side, IBV_QPT_RC, EVERY_OP);
	init.comp_mask &= ~IBV_QP_INIT_ATTR_PD;
	CHECK(!ibv_create_qp_ex(side.context, &init));
	EQUAL(errno, EINVAL);
	init = plan_ex(&side, IBV_QPT_RAW_PACKET, IBV_QP_EX_WITH_SEND);
	CHECK(!ibv_create_qp_ex(side.context, &init));
	EQUAL(errno, EOPNOTSUPP);

	uint64_t unclaimed[] = { IBV_WC_EX_WITH_COMPLETION_TIMESTAMP, IBV_WC_EX_WITH_CVLAN,
				 IBV_WC_EX_WITH_FLOW_TAG, IBV_WC_EX_WITH_TM_INFO,
				 IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK };
	for (size_t i = 0; i < sizeof unclaimed / sizeof *unclaimed; i++) {
		struct ibv_cq_init_attr_ex wanted = { .cqe = 4, .wc_flags = unclaimed[i] };
		CHECK(!ibv_create_cq_ex(side.context, &wanted));
		EQUAL(errno, EOPNOTSUPP);
	}
	CHECK(!ibv_create_cq_ex(side.context, &(struct ibv_cq_init_attr_ex){ .cqe = 0 }));
	EQUAL(errno, EINVAL);
	CHECK(!ibv_create_cq_ex(side.context, &(struct ibv_cq_init_attr_ex){ .cqe = 4, .comp_vector = 1 }));
	EQUAL(errno, EINVAL);
	destroy_side(&side);
	EQUAL(ibv_close_device(side.context), 0);
}

static int start_poll(struct ibv_cq_ex *cq)
{
	struct ibv_poll_cq_attr attr = { 0 };
	double end = seconds() + PATIENCE_S;
	int error;
	while ((error = ibv_start_poll(cq, &attr)) == ENOENT && seconds() < end)
		;
	return error;
}

static void completions_are_read_field_by_field(void)
{
	struct ibv_context *context = open_device();
	struct pair pair = { context, make_side(context, IBV_QPT_RC), make_parts(context, NULL) };
	struct side *a = &pair.a, *b = &pair.b;
	int name;
	struct ibv_cq_init_attr_ex wanted = { .cqe = DEPTH, .cq_context = &name,
					      .wc_flags = IBV_WC_STANDARD_FLAGS };
	struct ibv_cq_ex *cq = ibv_create_cq_ex(context, &wanted);
	CHECK(cq && cq->cq_context == &name && cq->cqe >= DEPTH);
	struct ibv_qp_init_attr init = plan(ibv_cq_ex_to_cq(cq), IBV_QPT_RC);
	CHECK(b->qp = ibv_create_qp(b->pd, &init));
	connect_pair(a->qp, b->qp);

	EQUAL(ibv_start_poll(cq, &(struct ibv_poll_cq_attr){ 0 }), ENOENT);
	EQUAL(ibv_start_poll(cq, &(struct ibv_poll_cq_attr){ .comp_mask = 1 }), EINVAL);
	for (int i = 0; i < 3; i++)
		EQUAL(post_receive(b, 20 + i, 64 * i, i == 2 ? 8 : 64), 0);
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = htobe32(6) };
	EQUAL(post(a, wr, 0, 33), 0);
	expect(a->cq, IBV_WC_SUCCESS);
	wr.opcode = IBV_WR_SEND;
	EQUAL(post(a, wr, 0, 34) | post(a, wr, 0, 35), 0); /* the second is too long */
	expect(a->cq, IBV_WC_SUCCESS);
	expect(a->cq, IBV_WC_REM_INV_REQ_ERR);

	EQUAL(start_poll(cq), 0);
	EQUAL(cq->wr_id, 20);
	EQUAL(cq->status, IBV_WC_SUCCESS);
	EQUAL(ibv_wc_read_opcode(cq), IBV_WC_RECV);
	EQUAL(ibv_wc_read_byte_len(cq), 33);
	EQUAL(ibv_wc_read_wc_flags(cq), IBV_WC_WITH_IMM);
	EQUAL(be32toh(ibv_wc_read_imm_data(cq)), 6);
	EQUAL(ibv_wc_read_qp_num(cq), b->qp->qp_num);
	EQUAL(ibv_wc_read_vendor_err(cq), 0);
	EQUAL(ibv_next_poll(cq), 0);
	EQUAL(cq->wr_id, 21);
	EQUAL(ibv_wc_read_byte_len(cq), 34);
	EQUAL(ibv_wc_read_wc_flags(cq), 0);
	EQUAL(ibv_next_poll(cq), 0);
	EQUAL(cq->wr_id, 22);
	EQUAL(cq->status, IBV_WC_LOC_LEN_ERR);
	CHECK(ibv_wc_read_vendor_err(cq) != 0);
	EQUAL(ibv_next_poll(cq), ENOENT);
	ibv_end_poll(cq);
	EQUAL(ibv_destroy_qp(b->qp), 0);
	b->qp = NULL;
	EQUAL(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)), 0);
	EQUAL(ibv_start_poll(cq, &(struct ibv_poll_cq_attr){ 0 }), EINVAL); /* destroyed */
	destroy_pair(&pair);
}

int main(int argc, char **argv)
{
	static const struct test CASES[] = {
		CASE(one_sided_operations_move_bytes),
		CASE(atomics_return_the_former_value),
		CASE(windows_are_bound_and_taken_away),
		CASE(datagrams_are_addressed_by_a_call),
		CASE(a_bad_batch_posts_nothing),
		CASE(what_cannot_be_had_is_not_made),
		CASE(completions_are_read_field_by_field),
	};
	return RUN(CASES, argc, argv);
}
