/* Memory windows: parts of a region that a peer may use for a time, under a separate key. */
#include "kit.h"

static struct ibv_mw_bind_info show(const struct side *side, size_t offset, size_t length)
{
	return (struct ibv_mw_bind_info){
		.mr = side->mr, .addr = (uintptr_t)side->bytes + offset, .length = length,
		.mw_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };
}

/* Type 1: the library draws a key, and the call binds. */
static void bind_type_1(const struct side *side, struct ibv_mw *mw, struct ibv_mw_bind_info info)
{
	struct ibv_mw_bind bind = { .wr_id = 7, .send_flags = IBV_SEND_SIGNALED, .bind_info = info };
	uint32_t before = mw->rkey;
	EQUAL(ibv_bind_mw(side->qp, mw, &bind), 0);
	struct ibv_wc wc = expect(side->cq, IBV_WC_SUCCESS);
	EQUAL(wc.opcode, IBV_WC_BIND_MW);
	EQUAL(wc.wr_id, 7);
	CHECK(mw->rkey != before);
}

/* Type 2: the program chooses the key's low byte, and a work request binds. */
static int post_bind(const struct side *side, struct ibv_mw *mw, uint32_t rkey, struct ibv_mw_bind_info info)
{
	struct ibv_send_wr wr = { .wr_id = 8, .opcode = IBV_WR_BIND_MW };
	wr.bind_mw.mw = mw;
	wr.bind_mw.rkey = rkey;
	wr.bind_mw.bind_info = info;
	return post(side, wr, 0, 0);
}

static void bind_type_2(const struct side *side, struct ibv_mw *mw, struct ibv_mw_bind_info info)
{
	uint32_t rkey = ibv_inc_rkey(mw->rkey);
	EQUAL(post_bind(side, mw, rkey, info), 0);
	EQUAL(expect(side->cq, IBV_WC_SUCCESS).opcode, IBV_WC_BIND_MW);
	mw->rkey = rkey; /* the program keeps track of the keys of these windows */
}

static void write_there(struct pair *pair, const void *address, uint32_t rkey, enum ibv_wc_status status)
{
	EQUAL(post(&pair->a, remote(IBV_WR_RDMA_WRITE, address, rkey), 0, 64), 0);
	expect(pair->a.cq, status);
}

/* Connects the two again after an error. */
static void reconnect(struct pair *pair)
{
	EQUAL(set_state(pair->a.qp, IBV_QPS_RESET), 0);
	EQUAL(set_state(pair->b.qp, IBV_QPS_RESET), 0);
	connect_pair(pair->a.qp, pair->b.qp);
}

static void type_1_shows_a_part_until_it_is_bound_elsewhere(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct side *b = &pair.b;
	struct ibv_mw *mw = ibv_alloc_mw(b->pd, IBV_MW_TYPE_1);
	CHECK(mw && mw->type == IBV_MW_TYPE_1 && mw->pd == b->pd && mw->context == pair.context);
	memset(pair.a.bytes, 0x11, 64);
	bind_type_1(b, mw, show(b, 4096, 128));
	uint32_t first = mw->rkey;
	write_there(&pair, b->bytes + 4096 + 64, first, IBV_WC_SUCCESS);
	CHECK(all_are(b->bytes + 4096 + 64, 64, 0x11) && all_are(b->bytes + 4096 + 128, 64, 0));
	write_there(&pair, b->bytes + 4096 + 65, first, IBV_WC_REM_ACCESS_ERR);
	CHECK(b->bytes[4096 + 128] == 0);

	reconnect(&pair);
	bind_type_1(b, mw, show(b, 8192, 128));
	write_there(&pair, b->bytes + 8192, mw->rkey, IBV_WC_SUCCESS);
	write_there(&pair, b->bytes + 4096, first, IBV_WC_REM_ACCESS_ERR);

	reconnect(&pair);
	uint32_t second = mw->rkey;
	bind_type_1(b, mw, (struct ibv_mw_bind_info){ .length = 0 });
	write_there(&pair, b->bytes + 8192, second, IBV_WC_REM_ACCESS_ERR);
	EQUAL(ibv_dealloc_mw(mw), 0);
	destroy_pair(&pair);
}

static void rights_are_the_windows_own(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct side *b = &pair.b;
	struct ibv_mw *mw = ibv_alloc_mw(b->pd, IBV_MW_TYPE_1);
	struct ibv_mw_bind_info info = show(b, 0, 64);
	info.mw_access_flags = IBV_ACCESS_REMOTE_READ;
	bind_type_1(b, mw, info);
	memset(b->bytes, 0x22, 64);
	EQUAL(post(&pair.a, remote(IBV_WR_RDMA_READ, b->bytes, mw->rkey), 0, 64), 0);
	EQUAL(expect(pair.a.cq, IBV_WC_SUCCESS).opcode, IBV_WC_RDMA_READ);
	CHECK(all_are(pair.a.bytes, 64, 0x22));
	write_there(&pair, b->bytes, mw->rkey, IBV_WC_REM_ACCESS_ERR);
	EQUAL(ibv_dealloc_mw(mw), 0);
	destroy_pair(&pair);
}

static void a_zero_based_window_begins_at_0(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct side *b = &pair.b;
	struct ibv_mw *mw = ibv_alloc_mw(b->pd, IBV_MW_TYPE_2);
	struct ibv_mw_bind_info info = show(b, 512, 128);
	info.mw_access_flags |= IBV_ACCESS_ZERO_BASED;
	bind_type_2(b, mw, info);
	memset(pair.a.bytes, 0x33, 64);
	write_there(&pair, (void *)64, mw->rkey, IBV_WC_SUCCESS);
	CHECK(all_are(b->bytes + 512 + 64, 64, 0x33));
	EQUAL(ibv_dealloc_mw(mw), 0);
	destroy_pair(&pair);
}

static void type_2_is_taken_away_by_its_owner(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct side *b = &pair.b;
	struct ibv_mw *mw = ibv_alloc_mw(b->pd, IBV_MW_TYPE_2);
	bind_type_2(b, mw, show(b, 0, 64));
	write_there(&pair, b->bytes, mw->rkey, IBV_WC_SUCCESS);
	struct ibv_send_wr invalidate = { .wr_id = 3, .opcode = IBV_WR_LOCAL_INV, .invalidate_rkey = mw->rkey };
	EQUAL(post(b, invalidate, 0, 0), 0);
	EQUAL(expect(b->cq, IBV_WC_SUCCESS).opcode, IBV_WC_LOCAL_INV);
	write_there(&pair, b->bytes, mw->rkey, IBV_WC_REM_ACCESS_ERR);
	reconnect(&pair);
	bind_type_2(b, mw, show(b, 0, 64)); /* can be bound again */
	write_there(&pair, b->bytes, mw->rkey, IBV_WC_SUCCESS);
	EQUAL(ibv_dealloc_mw(mw), 0);
	destroy_pair(&pair);
}

static void type_2_is_taken_away_by_a_send(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct side *b = &pair.b;
	struct ibv_mw *mw = ibv_alloc_mw(b->pd, IBV_MW_TYPE_2);
	bind_type_2(b, mw, show(b, 0, 64));
	EQUAL(post_receive(b, 5, 1024, 64), 0);
	memset(pair.a.bytes, 0x44, 64);
	struct ibv_send_wr send = { .opcode = IBV_WR_SEND_WITH_INV, .invalidate_rkey = mw->rkey };
	EQUAL(post(&pair.a, send, 0, 64), 0);
	EQUAL(expect(pair.a.cq, IBV_WC_SUCCESS).opcode, IBV_WC_SEND);
	struct ibv_wc wc = expect(b->cq, IBV_WC_SUCCESS);
	EQUAL(wc.opcode, IBV_WC_RECV);
	EQUAL(wc.wc_flags, IBV_WC_WITH_INV);
	EQUAL(wc.invalidated_rkey, mw->rkey);
	EQUAL(wc.byte_len, 64);
	CHECK(all_are(b->bytes + 1024, 64, 0x44));
	write_there(&pair, b->bytes, mw->rkey, IBV_WC_REM_ACCESS_ERR);
	EQUAL(ibv_dealloc_mw(mw), 0);
	destroy_pair(&pair);
}

/* A peer may invalidate windows of type 2, and nothing else. */
static void a_send_takes_no_region_away(void)
{
	for (int local = 0; local < 2; local++) {
		struct pair pair = make_pair(IBV_QPT_RC);
		EQUAL(post_receive(&pair.b, 5, 1024, 64), 0);
		struct ibv_send_wr wr = { .opcode = local ? IBV_WR_LOCAL_INV : IBV_WR_SEND_WITH_INV,
					  .invalidate_rkey = pair.b.mr->rkey };
		EQUAL(post(local ? &pair.b : &pair.a, wr, 0, local ? 0 : 64), 0);
		if (local) {
			expect(pair.b.cq, IBV_WC_LOC_QP_OP_ERR);
		} else {
			expect(pair.a.cq, IBV_WC_REM_ACCESS_ERR);
			expect(pair.b.cq, IBV_WC_REM_INV_REQ_ERR);
		}
		reconnect(&pair);
		write_there(&pair, pair.b.bytes, pair.b.mr->rkey, IBV_WC_SUCCESS);
		destroy_pair(&pair);
	}
}

static void type_2_serves_one_queue_pair_and_ends_with_it(void)
{
	struct pair pair = make_pair(IBV_QPT_RC), other = { .context = pair.context };
	struct side *b = &pair.b;
	other.a = make_side(pair.context, IBV_QPT_RC);
	other.b = *b; /* the same memory and domain, with a second queue pair */
	struct ibv_qp_init_attr init = plan(b->cq, IBV_QPT_RC);
	CHECK(other.b.qp = ibv_create_qp(b->pd, &init));
	connect_pair(other.a.qp, other.b.qp);

	struct ibv_mw *mw = ibv_alloc_mw(b->pd, IBV_MW_TYPE_2);
	bind_type_2(b, mw, show(b, 0, 64));
	write_there(&pair, b->bytes, mw->rkey, IBV_WC_SUCCESS);
	write_there(&other, b->bytes, mw->rkey, IBV_WC_REM_ACCESS_ERR);
	EQUAL(ibv_dereg_mr(b->mr), EBUSY);

	/* Without its queue pair it is unbound: the region can be deregistered, the window bound again. */
	EQUAL(ibv_destroy_qp(b->qp), 0);
	b->qp = other.b.qp;
	reconnect(&other);
	write_there(&other, b->bytes, mw->rkey, IBV_WC_REM_ACCESS_ERR);
	reconnect(&other);
	bind_type_2(&other.b, mw, show(b, 0, 64));
	write_there(&other, b->bytes, mw->rkey, IBV_WC_SUCCESS);
	EQUAL(ibv_destroy_qp(other.b.qp), 0);
	EQUAL(ibv_dereg_mr(b->mr), 0);
	EQUAL(ibv_dealloc_mw(mw), 0);
	(b->qp = NULL, b->mr = NULL);
	destroy_side(&other.a);
	destroy_pair(&pair);
}

static void a_region_under_a_window_stays(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct side *b = &pair.b;
	struct ibv_mw *mw = ibv_alloc_mw(b->pd, IBV_MW_TYPE_1);
	bind_type_1(b, mw, show(b, 0, 64));
	EQUAL(ibv_dereg_mr(b->mr), EBUSY);
	uint32_t rkey = b->mr->rkey;
	CHECK(ibv_rereg_mr(b->mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, EVERY_ACCESS) != 0);
	EQUAL(errno, EBUSY);
	EQUAL(b->mr->rkey, rkey);
	write_there(&pair, b->bytes, rkey, IBV_WC_SUCCESS);
	EQUAL(ibv_dealloc_mw(mw), 0);
	EQUAL(ibv_rereg_mr(b->mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, EVERY_ACCESS), 0);
	destroy_pair(&pair);
}

static void bad_bindings_fail(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct side *a = &pair.a, *b = &pair.b;
	struct ibv_mw *one = ibv_alloc_mw(b->pd, IBV_MW_TYPE_1), *two = ibv_alloc_mw(b->pd, IBV_MW_TYPE_2);
	struct ibv_mw_bind good = { .bind_info = show(b, 0, 64) }, bad = good;
	CHECK(one && two);
	CHECK(!ibv_alloc_mw(b->pd, 3));
	EQUAL(errno, EINVAL);
	EQUAL(ibv_bind_mw(b->qp, two, &good), EINVAL); /* type 2 is bound by work requests */
	bad.bind_info.mr = a->mr;
	EQUAL(ibv_bind_mw(b->qp, one, &bad), EPERM); /* another domain's region */
	bad = good;
	bad.bind_info.mr = NULL;
	EQUAL(ibv_bind_mw(b->qp, one, &bad), EINVAL);
	bad = good;
	bad.bind_info.mw_access_flags = 1 << 15;
	EQUAL(ibv_bind_mw(b->qp, one, &bad), EINVAL);

	/* Errors that only the queue pair can detect are completions. */
	struct ibv_mr *closed = ibv_reg_mr(b->pd, b->bytes, 64, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_mw_bind_info infos[] = { show(b, 0, BYTES + 1), show(b, 0, 64), show(b, 0, 0) };
	infos[1].mr = closed;
	for (size_t i = 0; i < sizeof infos / sizeof *infos; i++) {
		EQUAL(post_bind(b, two, ibv_inc_rkey(two->rkey), infos[i]), 0);
		expect(b->cq, IBV_WC_MW_BIND_ERR);
		reconnect(&pair);
	}
	EQUAL(post_bind(b, two, two->rkey ^ 0x40000000, show(b, 0, 64)), 0);
	expect(b->cq, IBV_WC_MW_BIND_ERR);
	reconnect(&pair);

	bind_type_2(b, two, show(b, 0, 64));
	EQUAL(post_bind(b, two, ibv_inc_rkey(two->rkey), show(b, 0, 64)), 0); /* already bound */
	expect(b->cq, IBV_WC_MW_BIND_ERR);
	EQUAL(ibv_dealloc_pd(b->pd), EBUSY);
	EQUAL(ibv_dealloc_mw(two), 0);
	EQUAL(post_bind(b, two, 1, show(b, 0, 64)), EINVAL); /* destroyed */
	EQUAL(ibv_dealloc_mw(one), 0);
	EQUAL(ibv_dereg_mr(closed), 0);
	destroy_pair(&pair);
}

int main(int argc, char **argv)
{
	static const struct test CASES[] = {
		CASE(type_1_shows_a_part_until_it_is_bound_elsewhere),
		CASE(rights_are_the_windows_own),
		CASE(a_zero_based_window_begins_at_0),
		CASE(type_2_is_taken_away_by_its_owner),
		CASE(type_2_is_taken_away_by_a_send),
		CASE(a_send_takes_no_region_away),
		CASE(type_2_serves_one_queue_pair_and_ends_with_it),
		CASE(a_region_under_a_window_stays),
		CASE(bad_bindings_fail),
	};
	return RUN(CASES, argc, argv);
}
