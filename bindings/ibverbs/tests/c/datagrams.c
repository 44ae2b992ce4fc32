/* Datagrams: address handles, replies to the sender, multicast groups, and drops. */
#include <arpa/inet.h>

#include "kit.h"

static const uint32_t GROUP_QPN = 0xffffff;

static int send_to(const struct side *from, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey, uint32_t length)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = htobe32(0xfeed),
				  .wr.ud = { .ah = ah, .remote_qpn = qpn, .remote_qkey = qkey } };
	return post(from, wr, 0, length);
}

static struct ibv_wc expect_datagram(const struct side *side, uint32_t from, uint32_t length, unsigned char value)
{
	struct ibv_wc wc = expect(side->cq, IBV_WC_SUCCESS);
	EQUAL(wc.opcode, IBV_WC_RECV);
	EQUAL(wc.byte_len, GRH + length);
	EQUAL(wc.src_qp, from);
	EQUAL(wc.qp_num, side->qp->qp_num);
	EQUAL(wc.wc_flags, IBV_WC_GRH | IBV_WC_WITH_IMM);
	EQUAL(be32toh(wc.imm_data), 0xfeed);
	CHECK(all_are(side->bytes + 4096 + GRH, length, value));
	return wc;
}

static void an_answer_goes_back_to_the_sender(void)
{
	struct pair pair = make_pair(IBV_QPT_UD);
	struct side *a = &pair.a, *b = &pair.b;
	struct ibv_ah_attr attr = own_address(pair.context), back;
	struct ibv_ah *ah = ibv_create_ah(a->pd, &attr);
	CHECK(ah && ah->pd == a->pd && ah->context == pair.context);
	EQUAL(post_receive(b, 1, 4096, 4096), 0);
	memset(a->bytes, 0x71, 100);
	EQUAL(send_to(a, ah, b->qp->qp_num, QKEY, 100), 0);
	expect(a->cq, IBV_WC_SUCCESS);
	struct ibv_wc wc = expect_datagram(b, a->qp->qp_num, 100, 0x71);

	struct ibv_grh *grh = (struct ibv_grh *)(b->bytes + 4096);
	EQUAL(ibv_init_ah_from_wc(pair.context, 1, &wc, grh, &back), 0);
	EQUAL(back.is_global, 1);
	EQUAL(back.port_num, 1);
	EQUAL(back.grh.sgid_index, 0);
	CHECK(!memcmp(&back.grh.dgid, &attr.grh.dgid, sizeof back.grh.dgid));
	struct ibv_ah *answer = ibv_create_ah_from_wc(b->pd, &wc, grh, 1);
	CHECK(answer);
	EQUAL(post_receive(a, 2, 4096, 4096), 0);
	memset(b->bytes, 0x72, 100);
	EQUAL(send_to(b, answer, wc.src_qp, 0x80000000, 100), 0); /* top bit set: the own key */
	expect(b->cq, IBV_WC_SUCCESS);
	expect_datagram(a, b->qp->qp_num, 100, 0x72);

	EQUAL(ibv_init_ah_from_wc(pair.context, 2, &wc, grh, &back), -1);
	EQUAL(errno, EINVAL);
	wc.wc_flags = 0; /* without a route header the sender is unknown */
	CHECK(!ibv_create_ah_from_wc(b->pd, &wc, grh, 1));
	EQUAL(errno, EINVAL);
	EQUAL(ibv_destroy_ah(answer) | ibv_destroy_ah(ah), 0);
	destroy_pair(&pair);
}

/* Two members of a group receive what a non-member sends. */
static void a_group_is_heard_by_all_members(void)
{
	struct pair pair = make_pair(IBV_QPT_UD);
	struct side *a = &pair.a, *b = &pair.b, third = make_side(pair.context, IBV_QPT_UD);
	struct ibv_ah_attr attr = own_address(pair.context);
	union ibv_gid group = { .raw = { [10] = 0xff, [11] = 0xff, 239, 17, 0, 1 } };
	attr.grh.dgid = group;
	to_init(third.qp);
	to_rts(third.qp, 0);
	EQUAL(ibv_attach_mcast(b->qp, &group, 0), 0);
	EQUAL(ibv_attach_mcast(b->qp, &group, 0), 0); /* joining twice has no further effect */
	EQUAL(ibv_attach_mcast(third.qp, &group, 0), 0);
	struct ibv_ah *ah = ibv_create_ah(a->pd, &attr);
	CHECK(ah);
	EQUAL(post_receive(b, 1, 4096, 4096) | post_receive(&third, 1, 4096, 4096), 0);
	memset(a->bytes, 0x73, 200);
	EQUAL(send_to(a, ah, GROUP_QPN, QKEY, 200), 0);
	expect(a->cq, IBV_WC_SUCCESS);
	expect_datagram(b, a->qp->qp_num, 200, 0x73);
	expect_datagram(&third, a->qp->qp_num, 200, 0x73);

	/* After one has left, the other receives the next datagram once. */
	EQUAL(ibv_detach_mcast(b->qp, &group, 0), 0);
	EQUAL(ibv_detach_mcast(b->qp, &group, 0), EINVAL);
	EQUAL(post_receive(b, 2, 4096, 4096), 0);
	EQUAL(post_receive(&third, 2, 4096, 4096) | post_receive(&third, 3, 4096, 4096), 0);
	memset(a->bytes, 0x74, 200);
	EQUAL(send_to(a, ah, GROUP_QPN, QKEY, 200), 0);
	EQUAL(expect_datagram(&third, a->qp->qp_num, 200, 0x74).wr_id, 2);
	expect_nothing(b->cq);
	expect_nothing(third.cq);

	/* A destroyed member leaves its groups. */
	EQUAL(ibv_destroy_ah(ah), 0);
	destroy_side(&third);
	destroy_pair(&pair);
}

/* A member receives its own datagrams: IBV_QP_CREATE_BLOCK_SELF_MCAST_LB is not supported. */
static void a_member_hears_its_own_datagrams(void)
{
	struct pair pair = make_pair(IBV_QPT_UD);
	struct side *a = &pair.a;
	struct ibv_ah_attr attr = own_address(pair.context);
	union ibv_gid group = { .raw = { [10] = 0xff, [11] = 0xff, 239, 17, 0, 3 } };
	attr.grh.dgid = group;
	struct ibv_ah *ah = ibv_create_ah(a->pd, &attr);
	EQUAL(ibv_attach_mcast(a->qp, &group, 0), 0);
	EQUAL(post_receive(a, 1, 4096, 4096), 0);
	memset(a->bytes, 0x76, 10);
	EQUAL(send_to(a, ah, GROUP_QPN, QKEY, 10), 0);
	EQUAL(expect(a->cq, IBV_WC_SUCCESS).opcode, IBV_WC_SEND);
	expect_datagram(a, a->qp->qp_num, 10, 0x76);
	EQUAL(ibv_destroy_ah(ah), 0);
	destroy_pair(&pair);
}

static void a_queue_pair_is_in_as_many_groups_as_the_device_says(void)
{
	struct ibv_context *context = open_device();
	struct side side = make_side(context, IBV_QPT_UD);
	struct ibv_device_attr device;
	EQUAL(ibv_query_device(context, &device), 0);
	union ibv_gid group = { .raw = { [10] = 0xff, [11] = 0xff, 239, 18, 0, 0 } };
	for (int i = 0; i < device.max_mcast_grp; i++) {
		(group.raw[14] = i >> 8, group.raw[15] = i);
		EQUAL(ibv_attach_mcast(side.qp, &group, 0), 0);
	}
	group.raw[13] = 19;
	EQUAL(ibv_attach_mcast(side.qp, &group, 0), ENOMEM);
	destroy_side(&side);
	EQUAL(ibv_close_device(context), 0);
}

static void groups_are_for_datagrams(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct side ud = make_side(pair.context, IBV_QPT_UD);
	union ibv_gid group = { .raw = { [10] = 0xff, [11] = 0xff, 239, 17, 0, 1 } };
	union ibv_gid host = { .raw = { [10] = 0xff, [11] = 0xff, 10, 0, 0, 1 } };
	EQUAL(ibv_attach_mcast(pair.a.qp, &group, 0), EINVAL);
	EQUAL(ibv_attach_mcast(ud.qp, &host, 0), EINVAL);
	EQUAL(ibv_attach_mcast(ud.qp, NULL, 0), EINVAL);
	EQUAL(ibv_attach_mcast(NULL, &group, 0), EINVAL);
	EQUAL(ibv_detach_mcast(ud.qp, &group, 0), EINVAL);
	destroy_side(&ud);
	destroy_pair(&pair);
}

/* Datagrams that do not fit are dropped silently; the receive stays for the next. */
static void what_does_not_fit_is_dropped(void)
{
	struct pair pair = make_pair(IBV_QPT_UD);
	struct side *a = &pair.a, *b = &pair.b;
	struct ibv_ah_attr attr = own_address(pair.context);
	struct ibv_ah *ah = ibv_create_ah(a->pd, &attr);
	EQUAL(post_receive(b, 1, 4096, GRH + 64), 0);
	EQUAL(send_to(a, ah, b->qp->qp_num, QKEY + 1, 64), 0); /* wrong key */
	EQUAL(send_to(a, ah, b->qp->qp_num, QKEY, 65), 0); /* one byte too long */
	EQUAL(send_to(a, ah, b->qp->qp_num ^ 0x80, QKEY, 64), 0); /* no such queue pair */
	memset(a->bytes, 0x75, 64);
	EQUAL(send_to(a, ah, b->qp->qp_num, QKEY, 64), 0);
	for (int i = 0; i < 4; i++)
		expect(a->cq, IBV_WC_SUCCESS);
	EQUAL(expect_datagram(b, a->qp->qp_num, 64, 0x75).wr_id, 1);
	expect_nothing(b->cq);
	EQUAL(post_receive(b, 2, 4096, GRH), 0);
	EQUAL(send_to(a, ah, b->qp->qp_num, QKEY, 0), 0); /* an empty datagram is valid */
	expect(a->cq, IBV_WC_SUCCESS);
	EQUAL(expect_datagram(b, a->qp->qp_num, 0, 0).wr_id, 2);
	EQUAL(ibv_destroy_ah(ah), 0);
	destroy_pair(&pair);
}

static void bad_addresses_are_refused(void)
{
	struct pair pair = make_pair(IBV_QPT_UD);
	struct side *a = &pair.a;
	struct ibv_ah_attr good = own_address(pair.context), bad[4] = { good, good, good, good };
	bad[0].is_global = 0;
	bad[1].port_num = 2;
	bad[2].grh.sgid_index = 200;
	memset(&bad[3].grh.dgid, 0, sizeof bad[3].grh.dgid);
	for (int i = 0; i < 4; i++) {
		CHECK(!ibv_create_ah(a->pd, &bad[i]));
		EQUAL(errno, EINVAL);
	}
	CHECK(!ibv_create_ah(NULL, &good) && !ibv_create_ah(a->pd, NULL));
	EQUAL(errno, EINVAL);

	struct ibv_ah *ah = ibv_create_ah(a->pd, &good);
	uint32_t peer = pair.b.qp->qp_num;
	EQUAL(send_to(a, NULL, peer, QKEY, 64), EINVAL);
	EQUAL(send_to(a, ah, peer, QKEY, 4097), EINVAL); /* longer than any packet */
	struct ibv_send_wr write = remote(IBV_WR_RDMA_WRITE, pair.b.bytes, pair.b.mr->rkey);
	write.wr.ud.ah = ah;
	EQUAL(post(a, write, 0, 64), EINVAL);
	EQUAL(ibv_dealloc_pd(a->pd), EBUSY);
	EQUAL(ibv_destroy_ah(ah), 0);
	EQUAL(ibv_destroy_ah(ah), EINVAL);
	EQUAL(send_to(a, ah, peer, QKEY, 64), EINVAL);
	destroy_pair(&pair);
}

/* An address handle alone keeps its domain in use. */
static void a_domain_with_an_address_handle_stays(void)
{
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_ah_attr attr = own_address(context);
	struct ibv_ah *ah = ibv_create_ah(pd, &attr);
	CHECK(ah);
	EQUAL(ibv_dealloc_pd(pd), EBUSY);
	EQUAL(ibv_destroy_ah(ah), 0);
	EQUAL(ibv_dealloc_pd(pd), 0);
	EQUAL(ibv_close_device(context), 0);
}

int main(int argc, char **argv)
{
	static const struct test CASES[] = {
		CASE(an_answer_goes_back_to_the_sender),
		CASE(a_group_is_heard_by_all_members),
		CASE(a_member_hears_its_own_datagrams),
		CASE(a_queue_pair_is_in_as_many_groups_as_the_device_says),
		CASE(groups_are_for_datagrams),
		CASE(what_does_not_fit_is_dropped),
		CASE(bad_addresses_are_refused),
		CASE(a_domain_with_an_address_handle_stays),
	};
	return RUN(CASES, argc, argv);
}
