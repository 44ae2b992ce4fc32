/* Memory regions: re-registration, invalid registration, translated addresses. */
#include <sys/mman.h>

#include "kit.h"

static void write_there(struct pair *pair, const void *address, uint32_t rkey, enum ibv_wc_status status)
{
	EQUAL(post(&pair->a, remote(IBV_WR_RDMA_WRITE, address, rkey), 0, 64), 0);
	expect(pair->a.cq, status);
}

static void a_region_moves_to_other_memory(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct side *b = &pair.b;
	unsigned char *other = calloc(1, 4096);
	uint32_t before = b->mr->rkey;
	EQUAL(ibv_rereg_mr(b->mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, other, 4096, 0), 0);
	CHECK(b->mr->addr == other && b->mr->length == 4096);
	memset(pair.a.bytes, 0x51, 64);
	write_there(&pair, other + 4096 - 64, b->mr->rkey, IBV_WC_SUCCESS);
	CHECK(all_are(other + 4096 - 64, 64, 0x51));
	write_there(&pair, b->bytes, before, IBV_WC_REM_ACCESS_ERR);
	CHECK(all_are(b->bytes, 64, 0));
	destroy_pair(&pair);
	free(other);
}

/* Peers may continue to use a key, as with adapters. */
static int has_keys_of(const struct ibv_mr *mr, const struct ibv_mr *before)
{
	return mr->lkey == before->lkey && mr->rkey == before->rkey && mr->handle == before->handle;
}

static void a_region_changes_rights_and_domain(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct side *b = &pair.b;
	struct ibv_pd *other = ibv_alloc_pd(pair.context);
	struct ibv_mr before = *b->mr;
	EQUAL(ibv_rereg_mr(b->mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, EVERY_ACCESS), 0);
	CHECK(has_keys_of(b->mr, &before));
	write_there(&pair, b->bytes, b->mr->rkey, IBV_WC_SUCCESS);
	EQUAL(ibv_rereg_mr(b->mr, IBV_REREG_MR_CHANGE_PD, other, NULL, 0, 0), 0);
	CHECK(b->mr->pd == other && has_keys_of(b->mr, &before));
	EQUAL(ibv_dealloc_pd(other), EBUSY);
	write_there(&pair, b->bytes, b->mr->rkey, IBV_WC_REM_ACCESS_ERR);
	EQUAL(ibv_rereg_mr(b->mr, IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS, b->pd, NULL, 0,
			   IBV_ACCESS_LOCAL_WRITE), 0);
	CHECK(b->mr->pd == b->pd && has_keys_of(b->mr, &before));
	EQUAL(ibv_dealloc_pd(other), 0);
	EQUAL(set_state(pair.a.qp, IBV_QPS_RESET) | set_state(b->qp, IBV_QPS_RESET), 0);
	connect_pair(pair.a.qp, b->qp);
	write_there(&pair, b->bytes, b->mr->rkey, IBV_WC_REM_ACCESS_ERR); /* remote access was removed */
	destroy_pair(&pair);
}

/* A refused call changes nothing. */
static void bad_changes_leave_the_region_as_it_was(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct ibv_mr *mr = pair.b.mr, before = *mr;
	int translation = IBV_REREG_MR_CHANGE_TRANSLATION, access = IBV_REREG_MR_CHANGE_ACCESS;
	EQUAL(ibv_rereg_mr(mr, 0, NULL, NULL, 0, 0), IBV_REREG_MR_ERR_INPUT);
	EQUAL(ibv_rereg_mr(mr, 1 << 9, NULL, NULL, 0, 0), IBV_REREG_MR_ERR_INPUT);
	EQUAL(ibv_rereg_mr(mr, translation, NULL, NULL, 0, 0), IBV_REREG_MR_ERR_INPUT);
	EQUAL(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, NULL, NULL, 0, 0), IBV_REREG_MR_ERR_INPUT);
	struct ibv_context *again = ibv_open_device(pair.context->device);
	struct ibv_pd *foreign = ibv_alloc_pd(again);
	EQUAL(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, foreign, NULL, 0, 0), IBV_REREG_MR_ERR_CMD);
	EQUAL(ibv_dealloc_pd(foreign) | ibv_close_device(again), 0);
	EQUAL(ibv_rereg_mr(NULL, access, NULL, NULL, 0, 0), IBV_REREG_MR_ERR_INPUT);
	EQUAL(errno, EINVAL);
	EQUAL(ibv_rereg_mr(mr, access, NULL, NULL, 0, IBV_ACCESS_REMOTE_WRITE), IBV_REREG_MR_ERR_CMD);
	EQUAL(errno, EINVAL);
	EQUAL(ibv_rereg_mr(mr, translation, NULL, (void *)4096, 4096, 0), IBV_REREG_MR_ERR_CMD);
	EQUAL(errno, EFAULT);
	CHECK(mr->addr == before.addr && mr->length == before.length && mr->pd == before.pd);
	CHECK(mr->lkey == before.lkey && mr->rkey == before.rkey);
	write_there(&pair, pair.b.bytes, mr->rkey, IBV_WC_SUCCESS);
	destroy_pair(&pair);
}

static void a_region_has_the_addresses_that_the_program_chose(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct side *b = &pair.b;
	struct ibv_mr *mr = ibv_reg_mr_iova(b->pd, b->bytes, 4096, 0x10000, EVERY_ACCESS);
	/* Optional flags are accepted and have no effect. */
	int zero_based = EVERY_ACCESS | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_RELAXED_ORDERING;
	struct ibv_mr *zero = ibv_reg_mr(b->pd, b->bytes, 4096, zero_based);
	CHECK(mr && zero);
	memset(pair.a.bytes, 0x61, 64);
	write_there(&pair, (void *)0x10040, mr->rkey, IBV_WC_SUCCESS);
	write_there(&pair, (void *)0x100, zero->rkey, IBV_WC_SUCCESS);
	CHECK(all_are(b->bytes + 64, 64, 0x61) && all_are(b->bytes + 256, 64, 0x61));
	write_there(&pair, b->bytes, mr->rkey, IBV_WC_REM_ACCESS_ERR);
	EQUAL(ibv_dereg_mr(mr) | ibv_dereg_mr(zero), 0);
	destroy_pair(&pair);
}

static void *place(struct ibv_pd *pd, void *context, size_t size, size_t alignment, uint64_t type)
{
	(void)pd, (void)context, (void)size, (void)alignment, (void)type;
	return NULL;
}

static void displace(struct ibv_pd *pd, void *context, void *memory, uint64_t type)
{
	(void)pd, (void)context, (void)memory, (void)type;
}

static void a_parent_domain_stands_for_its_domain(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct side *b = &pair.b;
	struct ibv_parent_domain_init_attr attr = { .pd = b->pd, .alloc = place, .free = displace,
		.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT };
	struct ibv_pd *parent = ibv_alloc_parent_domain(pair.context, &attr);
	CHECK(parent && parent != b->pd);
	struct ibv_mr *mr = ibv_reg_mr(parent, b->bytes, 4096, EVERY_ACCESS);
	CHECK(mr && mr->pd == parent);
	memset(pair.a.bytes, 0x71, 64);
	write_there(&pair, b->bytes, mr->rkey, IBV_WC_SUCCESS); /* the queue pair is in the original domain */
	CHECK(all_are(b->bytes, 64, 0x71));

	struct ibv_cq_init_attr_ex wanted = { .cqe = DEPTH, .parent_domain = parent,
					      .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD };
	struct ibv_cq_ex *cq = ibv_create_cq_ex(pair.context, &wanted);
	CHECK(cq);
	wanted.parent_domain = b->pd;
	CHECK(!ibv_create_cq_ex(pair.context, &wanted));
	EQUAL(errno, EINVAL);

	for (int wrong = 0; wrong < 4; wrong++) {
		struct ibv_parent_domain_init_attr bad = attr;
		if (wrong == 0) bad.pd = NULL;
		if (wrong == 1) bad.pd = parent;
		if (wrong == 2) bad.free = NULL;
		if (wrong == 3) bad.comp_mask = 1 << 9;
		CHECK(!ibv_alloc_parent_domain(pair.context, &bad));
		EQUAL(errno, EINVAL);
	}
	EQUAL(ibv_dereg_mr(mr) | ibv_destroy_cq(ibv_cq_ex_to_cq(cq)), 0);
	struct ibv_pd *alone = ibv_alloc_pd(pair.context);
	attr.pd = alone;
	struct ibv_pd *other = ibv_alloc_parent_domain(pair.context, &attr);
	EQUAL(ibv_dealloc_pd(alone), EBUSY);
	EQUAL(ibv_dealloc_pd(other) | ibv_dealloc_pd(alone) | ibv_dealloc_pd(parent), 0);
	destroy_pair(&pair);
}

static void memory_that_cannot_be_written_is_read_only(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct side *a = &pair.a;
	void *page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(page != MAP_FAILED);
	CHECK(!ibv_reg_mr(a->pd, page, 4096, IBV_ACCESS_LOCAL_WRITE));
	EQUAL(errno, EFAULT);
	struct ibv_mr *mr = ibv_reg_mr(a->pd, page, 4096, IBV_ACCESS_REMOTE_READ);
	CHECK(mr);
	struct ibv_sge sge = { (uintptr_t)page, 64, mr->lkey };
	struct ibv_send_wr wr = remote(IBV_WR_RDMA_READ, pair.b.bytes, pair.b.mr->rkey);
	(wr.sg_list = &sge, wr.num_sge = 1);
	EQUAL(post(a, wr, 0, 64), 0);
	expect(a->cq, IBV_WC_LOC_PROT_ERR); /* the READ response cannot be placed */
	EQUAL(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE), IBV_REREG_MR_ERR_CMD);
	EQUAL(errno, EFAULT);
	EQUAL(ibv_dereg_mr(mr), 0);
	EQUAL(munmap(page, 4096), 0);
	destroy_pair(&pair);
}

static void what_is_not_there_is_refused(void)
{
	struct side side = make_parts(open_device(), NULL);
	struct ibv_sge sge = piece(&side, 0, 64);
	CHECK(!ibv_reg_mr(side.pd, side.bytes, 64, IBV_ACCESS_ON_DEMAND));
	EQUAL(errno, EINVAL);
	CHECK(!ibv_reg_dmabuf_mr(side.pd, 0, 64, 0, -1, IBV_ACCESS_LOCAL_WRITE));
	EQUAL(errno, EBADF);
	CHECK(!ibv_reg_dmabuf_mr(side.pd, 0, 64, 0, 0, IBV_ACCESS_LOCAL_WRITE)); /* no dma-buf */
	EQUAL(errno, EINVAL);
	CHECK(!ibv_alloc_null_mr(side.pd));
	EQUAL(errno, EOPNOTSUPP);
	struct ibv_alloc_dm_attr dm = { .length = 64 };
	CHECK(!ibv_alloc_dm(side.context, &dm));
	EQUAL(errno, EOPNOTSUPP);
	EQUAL(ibv_advise_mr(side.pd, IBV_ADVISE_MR_ADVICE_PREFETCH, IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1), 0);
	EQUAL(ibv_advise_mr(side.pd, 9, 0, &sge, 1), EOPNOTSUPP);
	EQUAL(ibv_advise_mr(side.pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 1 << 7, &sge, 1), EINVAL);
	sge.lkey ^= 0x5500;
	EQUAL(ibv_advise_mr(side.pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1), EFAULT);
	sge = piece(&side, BYTES - 63, 64);
	EQUAL(ibv_advise_mr(side.pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, 0, &sge, 1), EFAULT);
	destroy_side(&side);
	EQUAL(ibv_close_device(side.context), 0);
}

/* As many pieces as soft-RoCE takes, each as short or as long as it likes, on both sides: the bytes go from one list into
 * the other as if both were one piece. */
static void messages_have_many_pieces(void)
{
	enum { PIECES = 32 };
	struct ibv_sge from[PIECES], into[PIECES];
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND, .sg_list = from, .num_sge = PIECES };
	struct ibv_recv_wr receive = { .sg_list = into, .num_sge = PIECES }, *bad;
	struct pair pair = { .context = open_device() };
	struct side *sides[] = { &pair.a, &pair.b };
	for (int at = 0; at < 2; at++) {
		*sides[at] = make_parts(pair.context, NULL);
		struct ibv_qp_init_attr init = plan(sides[at]->cq, IBV_QPT_RC);
		init.cap.max_send_sge = init.cap.max_recv_sge = PIECES;
		CHECK(sides[at]->qp = ibv_create_qp(sides[at]->pd, &init));
		EQUAL(init.cap.max_send_sge, PIECES);
	}
	connect_pair(pair.a.qp, pair.b.qp);
	for (int longest = 3; longest <= 600; longest += 199) { /* within a packet, and across many */
		size_t total = 0, place = 0, got = 0, room = 0;
		for (int at = 0; at < PIECES; at++) {
			uint32_t length = at * 7 % longest, space = (PIECES - at) * 5 % longest;
			memset(pair.a.bytes + place, at + 1, length);
			from[at] = piece(&pair.a, place, length);
			into[at] = piece(&pair.b, at * 1000, space);
			(total += length, room += space);
			place += length + 13;
		}
		into[PIECES - 1].length += total > room ? total - room : 0;
		EQUAL(ibv_post_recv(pair.b.qp, &receive, &bad), 0);
		EQUAL(post(&pair.a, wr, 0, 0), 0);
		expect(pair.a.cq, IBV_WC_SUCCESS);
		EQUAL(expect(pair.b.cq, IBV_WC_SUCCESS).byte_len, total);
		uint32_t in_piece = 0;
		for (int at = 0, source = 0; at < PIECES; at++) {
			const unsigned char *here = pair.b.bytes + at * 1000;
			for (uint32_t byte = 0; byte < into[at].length && got < total; byte++, got++) {
				while (in_piece == from[source].length)
					(source++, in_piece = 0);
				EQUAL(here[byte], source + 1);
				in_piece++;
			}
		}
		EQUAL(got, total);
	}
	wr.num_sge = PIECES + 1;
	EQUAL(post(&pair.a, wr, 0, 0), EINVAL);
	destroy_pair(&pair);
}

int main(int argc, char **argv)
{
	static const struct test CASES[] = {
		CASE(a_region_moves_to_other_memory),
		CASE(a_region_changes_rights_and_domain),
		CASE(bad_changes_leave_the_region_as_it_was),
		CASE(a_region_has_the_addresses_that_the_program_chose),
		CASE(a_parent_domain_stands_for_its_domain),
		CASE(memory_that_cannot_be_written_is_read_only),
		CASE(what_is_not_there_is_refused),
		CASE(messages_have_many_pieces),
	};
	return RUN(CASES, argc, argv);
}
