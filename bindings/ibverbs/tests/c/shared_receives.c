/* Shared receive queues: limit event, destruction, and the last work request of a queue pair. */
#include "kit.h"

static struct ibv_srq *make_srq(struct ibv_pd *pd)
{
	struct ibv_srq_init_attr init = { .srq_context = pd, .attr = { .max_wr = DEPTH, .max_sge = 2 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &init);
	CHECK(srq && srq->pd == pd && srq->srq_context == pd);
	CHECK(init.attr.max_wr >= DEPTH && init.attr.max_sge >= 2);
	return srq;
}

static int post_shared(struct ibv_srq *srq, const struct side *side, uint64_t wr_id)
{
	struct ibv_sge sge = piece(side, 4096 + wr_id * 64, 64);
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1 }, *bad = NULL;
	int error = ibv_post_srq_recv(srq, &wr, &bad);
	CHECK(!error || bad == &wr);
	return error;
}

static struct ibv_srq_attr queried(struct ibv_srq *srq)
{
	struct ibv_srq_attr attr;
	EQUAL(ibv_query_srq(srq, &attr), 0);
	return attr;
}

static int set_limit(struct ibv_srq *srq, uint32_t limit)
{
	struct ibv_srq_attr attr = { .srq_limit = limit };
	return ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT);
}

/* Two queue pairs of b use one queue. */
struct shared {
	struct ibv_context *context;
	struct side a, a2, b;
	struct ibv_srq *srq;
	struct ibv_qp *second;
};

static struct shared make_shared(void)
{
	struct shared all = { .context = open_device() };
	all.a = make_side(all.context, IBV_QPT_RC);
	all.a2 = make_side(all.context, IBV_QPT_RC);
	all.b = make_parts(all.context, NULL);
	all.srq = make_srq(all.b.pd);
	struct ibv_qp_init_attr init = plan(all.b.cq, IBV_QPT_RC);
	init.srq = all.srq;
	CHECK(all.b.qp = ibv_create_qp(all.b.pd, &init));
	EQUAL(init.cap.max_recv_wr, 0);
	CHECK(all.second = ibv_create_qp(all.b.pd, &init));
	connect_pair(all.a.qp, all.b.qp);
	connect_pair(all.a2.qp, all.second);
	return all;
}

static void destroy_shared(struct shared *all)
{
	EQUAL(ibv_destroy_srq(all->srq), EBUSY);
	EQUAL(ibv_destroy_qp(all->second), 0);
	EQUAL(ibv_destroy_qp(all->b.qp), 0);
	all->b.qp = NULL;
	EQUAL(ibv_dealloc_pd(all->b.pd), EBUSY);
	EQUAL(ibv_destroy_srq(all->srq), 0);
	destroy_side(&all->a);
	destroy_side(&all->a2);
	destroy_side(&all->b);
	EQUAL(ibv_close_device(all->context), 0);
}

static void send_one(const struct side *from, const struct side *to, uint64_t wr_id)
{
	EQUAL(post(from, (struct ibv_send_wr){ .opcode = IBV_WR_SEND }, 0, 64), 0);
	expect(from->cq, IBV_WC_SUCCESS);
	EQUAL(expect(to->cq, IBV_WC_SUCCESS).wr_id, wr_id);
}

static void the_limit_makes_one_event(void)
{
	struct shared all = make_shared();
	for (int i = 0; i < 4; i++)
		EQUAL(post_shared(all.srq, &all.b, i), 0);
	EQUAL(set_limit(all.srq, 3), 0);
	EQUAL(queried(all.srq).srq_limit, 3);
	memset(all.a.bytes, 0x31, 64);
	memset(all.a2.bytes, 0x32, 64);
	send_one(&all.a, &all.b, 0);
	CHECK(!readable(all.context->async_fd, 20)); /* three are left */
	send_one(&all.a2, &all.b, 1);
	CHECK(all_are(all.b.bytes + 4096, 64, 0x31) && all_are(all.b.bytes + 4096 + 64, 64, 0x32));
	struct ibv_async_event event = next_event(all.context);
	EQUAL(event.event_type, IBV_EVENT_SRQ_LIMIT_REACHED);
	CHECK(event.element.srq == all.srq);
	EQUAL(queried(all.srq).srq_limit, 0); /* disarmed by its event */
	send_one(&all.a, &all.b, 2);
	CHECK(!readable(all.context->async_fd, 20));
	destroy_shared(&all);
}

/* The event arrives although nothing is sent or polled. */
static void a_limit_above_what_is_left_makes_its_event_at_once(void)
{
	struct shared all = make_shared();
	EQUAL(post_shared(all.srq, &all.b, 0), 0);
	EQUAL(set_limit(all.srq, 2), 0);
	CHECK(readable(all.context->async_fd, 1000));
	EQUAL(next_event(all.context).event_type, IBV_EVENT_SRQ_LIMIT_REACHED);
	destroy_shared(&all);
}

static void the_last_work_request_is_announced(void)
{
	struct shared all = make_shared();
	EQUAL(post_shared(all.srq, &all.b, 0), 0);
	EQUAL(set_state(all.b.qp, IBV_QPS_ERR), 0);
	struct ibv_async_event event = next_event(all.context);
	EQUAL(event.event_type, IBV_EVENT_QP_LAST_WQE_REACHED);
	CHECK(event.element.qp == all.b.qp);
	expect_nothing(all.b.cq); /* the receive belongs to the shared queue, so it is not flushed */
	send_one(&all.a2, &all.b, 0);
	destroy_shared(&all);
}

/* Datagrams use receives of a shared queue as of a private one. */
static void datagrams_take_from_it_too(void)
{
	struct ibv_context *context = open_device();
	struct side a = make_side(context, IBV_QPT_UD), b = make_parts(context, NULL);
	struct ibv_srq *srq = make_srq(b.pd);
	struct ibv_qp_init_attr init = plan(b.cq, IBV_QPT_UD);
	struct ibv_ah_attr attr = own_address(context);
	struct ibv_ah *ah = ibv_create_ah(a.pd, &attr);
	init.srq = srq;
	CHECK(ah && (b.qp = ibv_create_qp(b.pd, &init)));
	to_init(a.qp);
	to_init(b.qp);
	to_rts(a.qp, 0);
	to_rts(b.qp, 0);
	EQUAL(post_shared(srq, &b, 0), 0);
	memset(a.bytes, 0x33, 24);
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND,
		.wr.ud = { .ah = ah, .remote_qpn = b.qp->qp_num, .remote_qkey = QKEY } };
	EQUAL(post(&a, wr, 0, 24), 0);
	expect(a.cq, IBV_WC_SUCCESS);
	struct ibv_wc wc = expect(b.cq, IBV_WC_SUCCESS);
	EQUAL(wc.byte_len, GRH + 24);
	EQUAL(wc.qp_num, b.qp->qp_num);
	CHECK(all_are(b.bytes + 4096 + GRH, 24, 0x33));
	EQUAL(ibv_destroy_ah(ah), 0);
	EQUAL(ibv_destroy_qp(b.qp) | ibv_destroy_srq(srq), 0);
	b.qp = NULL;
	destroy_side(&a);
	destroy_side(&b);
	EQUAL(ibv_close_device(context), 0);
}

static void the_queue_takes_what_it_was_made_for(void)
{
	struct shared all = make_shared();
	for (uint32_t i = 0; i < queried(all.srq).max_wr; i++)
		EQUAL(post_shared(all.srq, &all.b, i % 8), 0);
	EQUAL(post_shared(all.srq, &all.b, 0), ENOMEM);

	struct ibv_sge sges[3] = { piece(&all.b, 0, 8), piece(&all.b, 8, 8), piece(&all.b, 16, 8) };
	struct ibv_recv_wr wr = { .sg_list = sges, .num_sge = 3 }, *bad = NULL;
	EQUAL(ibv_post_srq_recv(all.srq, &wr, &bad), EINVAL);
	CHECK(bad == &wr);
	destroy_shared(&all);
}

static void the_queue_is_as_large_as_the_device_says(void)
{
	struct side side = make_parts(open_device(), NULL);
	struct ibv_device_attr device;
	EQUAL(ibv_query_device(side.context, &device), 0);
	struct ibv_srq_init_attr init = { .attr = { .max_wr = device.max_srq_wr, .max_sge = device.max_srq_sge } };
	struct ibv_srq *srq = ibv_create_srq(side.pd, &init);
	CHECK(srq);
	EQUAL(queried(srq).max_wr, device.max_srq_wr);
	EQUAL(ibv_destroy_srq(srq), 0);
	init.attr.max_wr = device.max_srq_wr + 1;
	CHECK(!ibv_create_srq(side.pd, &init));
	EQUAL(errno, EINVAL);
	destroy_side(&side);
	EQUAL(ibv_close_device(side.context), 0);
}

static void bad_changes_are_refused(void)
{
	struct shared all = make_shared();
	struct ibv_srq_attr attr = { .max_wr = 2 * DEPTH };
	EQUAL(ibv_modify_srq(all.srq, &attr, IBV_SRQ_MAX_WR), EINVAL); /* IBV_DEVICE_SRQ_RESIZE is not reported */
	EQUAL(set_limit(all.srq, DEPTH + 1), EINVAL);
	EQUAL(ibv_modify_srq(all.srq, NULL, IBV_SRQ_LIMIT), EINVAL);
	EQUAL(ibv_query_srq(all.srq, NULL), EINVAL);
	CHECK(!ibv_create_srq(NULL, &(struct ibv_srq_init_attr){ .attr = { .max_wr = 1, .max_sge = 1 } }));
	EQUAL(errno, EINVAL);
	struct ibv_srq_init_attr_ex ex = { .attr = { .max_wr = 1, .max_sge = 1 }, .pd = all.b.pd,
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD, .srq_type = IBV_SRQT_BASIC };
	struct ibv_srq *basic = ibv_create_srq_ex(all.context, &ex);
	CHECK(basic && !ibv_destroy_srq(basic));
	ex.srq_type = IBV_SRQT_XRC;
	CHECK(!ibv_create_srq_ex(all.context, &ex));
	EQUAL(errno, EOPNOTSUPP);
	uint32_t number;
	EQUAL(ibv_get_srq_num(all.srq, &number), EOPNOTSUPP);

	/* A queue pair of another domain cannot use it. */
	struct ibv_qp_init_attr init = plan(all.a.cq, IBV_QPT_RC);
	init.srq = all.srq;
	CHECK(!ibv_create_qp(all.a.pd, &init));
	EQUAL(errno, EINVAL);

	/* Receives are posted to the shared queue, not to the queue pair. */
	struct ibv_sge sge = piece(&all.b, 0, 8);
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad = NULL;
	EQUAL(ibv_post_recv(all.b.qp, &wr, &bad), EINVAL);
	CHECK(bad == &wr);
	destroy_shared(&all);
	EQUAL(ibv_post_srq_recv(all.srq, &wr, &bad), EINVAL); /* destroyed */
	EQUAL(ibv_destroy_srq(all.srq), EINVAL);
}

int main(int argc, char **argv)
{
	static const struct test CASES[] = {
		CASE(the_limit_makes_one_event),
		CASE(a_limit_above_what_is_left_makes_its_event_at_once),
		CASE(the_last_work_request_is_announced),
		CASE(datagrams_take_from_it_too),
		CASE(the_queue_takes_what_it_was_made_for),
		CASE(the_queue_is_as_large_as_the_device_says),
		CASE(bad_changes_are_refused),
	};
	return RUN(CASES, argc, argv);
}
