/* Notifications: completion channels, solicited completions, resized and overrun queues. */
#include "kit.h"

static struct ibv_send_wr send_wr(unsigned flags)
{
	return (struct ibv_send_wr){ .opcode = IBV_WR_SEND, .send_flags = flags };
}

/* A pair whose second side has two completion queues on a channel, for sends and for receives. */
struct watched {
	struct pair pair;
	struct ibv_comp_channel *channel;
	struct ibv_cq *sends, *receives;
	int name_of_sends, name_of_receives;
};

static void make_watched(struct watched *all)
{
	struct ibv_context *context = open_device();
	all->pair = (struct pair){ context, make_side(context, IBV_QPT_RC), make_parts(context, NULL) };
	struct side *b = &all->pair.b;
	CHECK(all->channel = ibv_create_comp_channel(context));
	CHECK(all->sends = ibv_create_cq(context, DEPTH, &all->name_of_sends, all->channel, 0));
	CHECK(all->receives = ibv_create_cq(context, DEPTH, &all->name_of_receives, all->channel, 0));
	struct ibv_qp_init_attr init = plan(all->sends, IBV_QPT_RC);
	init.recv_cq = all->receives;
	CHECK(b->qp = ibv_create_qp(b->pd, &init));
	connect_pair(all->pair.a.qp, b->qp);
}

static void destroy_watched(struct watched *all)
{
	EQUAL(ibv_destroy_comp_channel(all->channel), EBUSY);
	EQUAL(ibv_destroy_cq(all->sends), EBUSY);
	EQUAL(ibv_destroy_qp(all->pair.b.qp), 0);
	all->pair.b.qp = NULL;
	EQUAL(ibv_destroy_cq(all->sends) | ibv_destroy_cq(all->receives), 0);
	EQUAL(ibv_destroy_comp_channel(all->channel), 0);
	destroy_pair(&all->pair);
}

static struct ibv_cq *next_cq(struct watched *all, void **context)
{
	struct ibv_cq *cq = NULL;
	EQUAL(ibv_get_cq_event(all->channel, &cq, context), 0);
	uint32_t completed = cq->comp_events_completed;
	ibv_ack_cq_events(cq, 1);
	EQUAL(cq->comp_events_completed, completed + 1);
	return cq;
}

static void each_queue_of_a_channel_names_itself(void)
{
	struct watched all;
	void *context;
	make_watched(&all);
	struct side *a = &all.pair.a, *b = &all.pair.b;
	set_nonblocking(all.channel->fd);
	struct ibv_cq *cq = NULL;
	EQUAL(ibv_get_cq_event(all.channel, &cq, &context), -1);
	EQUAL(errno, EAGAIN);

	EQUAL(ibv_req_notify_cq(all.receives, 0) | ibv_req_notify_cq(all.sends, 0), 0);
	EQUAL(post_receive(b, 1, 0, 64), 0);
	EQUAL(post(a, send_wr(0), 0, 64), 0);
	CHECK(readable(all.channel->fd, 5000));
	CHECK(next_cq(&all, &context) == all.receives && context == &all.name_of_receives);
	expect(all.receives, IBV_WC_SUCCESS);
	CHECK(!readable(all.channel->fd, 20)); /* the other one is still armed */
	EQUAL(post_receive(a, 1, 0, 64), 0);
	EQUAL(post(b, send_wr(0), 0, 64), 0);
	CHECK(readable(all.channel->fd, 5000));
	CHECK(next_cq(&all, &context) == all.sends && context == &all.name_of_sends);
	expect(all.sends, IBV_WC_SUCCESS);

	/* The event disarms the queue: the next completion causes none. */
	EQUAL(post_receive(b, 2, 0, 64), 0);
	EQUAL(post(a, send_wr(0), 0, 64), 0);
	expect(all.receives, IBV_WC_SUCCESS);
	CHECK(!readable(all.channel->fd, 20));
	destroy_watched(&all);
}

static void only_solicited_completions_wake(void)
{
	struct watched all;
	void *context;
	make_watched(&all);
	struct side *a = &all.pair.a, *b = &all.pair.b;
	for (int i = 0; i < 3; i++)
		EQUAL(post_receive(b, i, 0, 64), 0);
	EQUAL(ibv_req_notify_cq(all.receives, 1), 0);
	EQUAL(post(a, send_wr(0), 0, 64), 0);
	expect(a->cq, IBV_WC_SUCCESS);
	CHECK(!readable(all.channel->fd, 20));
	EQUAL(post(a, send_wr(IBV_SEND_SOLICITED), 0, 64), 0);
	CHECK(readable(all.channel->fd, 5000));
	CHECK(next_cq(&all, &context) == all.receives);

	/* A completion with error counts as solicited. */
	EQUAL(ibv_req_notify_cq(all.receives, 1), 0);
	EQUAL(set_state(b->qp, IBV_QPS_ERR), 0);
	CHECK(readable(all.channel->fd, 5000));
	CHECK(next_cq(&all, &context) == all.receives);
	EQUAL(expect(all.receives, IBV_WC_SUCCESS).wr_id, 0);
	EQUAL(expect(all.receives, IBV_WC_SUCCESS).wr_id, 1);
	EQUAL(expect(all.receives, IBV_WC_WR_FLUSH_ERR).wr_id, 2);
	destroy_watched(&all);
}

static void bad_places_for_events_lose_none(void)
{
	struct watched all;
	void *context;
	make_watched(&all);
	EQUAL(post_receive(&all.pair.b, 1, 0, 64), 0);
	EQUAL(ibv_req_notify_cq(all.receives, 0), 0);
	EQUAL(set_state(all.pair.b.qp, IBV_QPS_ERR), 0);
	EQUAL(ibv_get_cq_event(all.channel, NULL, &context), -1);
	EQUAL(errno, EINVAL);
	EQUAL(ibv_get_cq_event(NULL, &all.sends, &context), -1);
	EQUAL(errno, EINVAL);
	EQUAL(ibv_get_async_event(NULL, &(struct ibv_async_event){ 0 }), -1);
	EQUAL(errno, EINVAL);
	CHECK(readable(all.channel->fd, 5000));
	CHECK(next_cq(&all, &context) == all.receives);
	ibv_ack_cq_events(NULL, 1);
	destroy_watched(&all);
}

static void a_bad_place_for_an_asynchronous_event_loses_none(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1 };
	set_nonblocking(pair.context->async_fd);
	EQUAL(ibv_get_async_event(pair.context, &(struct ibv_async_event){ 0 }), -1);
	EQUAL(errno, EAGAIN);
	EQUAL(ibv_modify_qp(pair.a.qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
	EQUAL(ibv_get_async_event(pair.context, NULL), -1);
	EQUAL(errno, EINVAL);
	EQUAL(next_event(pair.context).event_type, IBV_EVENT_SQ_DRAINED);
	destroy_pair(&pair);
}

static void a_queue_is_resized_around_what_is_in_it(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct ibv_device_attr device;
	struct side *a = &pair.a;
	EQUAL(ibv_query_device(pair.context, &device), 0);
	for (int i = 0; i < 8; i++)
		EQUAL(post_receive(a, i, 0, 8), 0);
	EQUAL(set_state(a->qp, IBV_QPS_ERR), 0); /* eight flushed receives */
	EQUAL(ibv_resize_cq(a->cq, 4), EINVAL);
	EQUAL(a->cq->cqe, 4 * DEPTH);
	EQUAL(ibv_resize_cq(a->cq, 8), 0);
	EQUAL(a->cq->cqe, 8);
	EQUAL(ibv_resize_cq(a->cq, 1000), 0);
	EQUAL(a->cq->cqe, 1000);
	EQUAL(ibv_resize_cq(a->cq, 0), EINVAL);
	EQUAL(ibv_resize_cq(a->cq, -1), EINVAL);
	EQUAL(ibv_resize_cq(a->cq, device.max_cqe + 1), EINVAL);
	EQUAL(ibv_resize_cq(NULL, 8), EINVAL);
	for (int i = 0; i < 8; i++)
		EQUAL(expect(a->cq, IBV_WC_WR_FLUSH_ERR).wr_id, i);
	destroy_pair(&pair);
}

static void an_overrun_queue_takes_its_queue_pairs_along(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	struct side *b = &pair.b;
	struct ibv_wc wc;
	EQUAL(ibv_resize_cq(b->cq, 2), 0);
	for (int i = 0; i < 3; i++)
		EQUAL(post_receive(b, i, 0, 64), 0);
	for (int i = 0; i < 3; i++)
		EQUAL(post(&pair.a, send_wr(0), 0, 64), 0);
	struct ibv_async_event event = next_event(pair.context);
	EQUAL(event.event_type, IBV_EVENT_CQ_ERR);
	CHECK(event.element.cq == b->cq);
	event = next_event(pair.context);
	EQUAL(event.event_type, IBV_EVENT_QP_FATAL);
	CHECK(event.element.qp == b->qp);
	EQUAL(state_of(b->qp), IBV_QPS_ERR);
	EQUAL(expect(b->cq, IBV_WC_SUCCESS).wr_id, 0);
	EQUAL(expect(b->cq, IBV_WC_SUCCESS).wr_id, 1);
	CHECK(ibv_poll_cq(b->cq, 1, &wc) < 0); /* the lost completion is reported */
	destroy_pair(&pair);
}

int main(int argc, char **argv)
{
	static const struct test CASES[] = {
		CASE(each_queue_of_a_channel_names_itself),
		CASE(only_solicited_completions_wake),
		CASE(bad_places_for_events_lose_none),
		CASE(a_bad_place_for_an_asynchronous_event_loses_none),
		CASE(a_queue_is_resized_around_what_is_in_it),
		CASE(an_overrun_queue_takes_its_queue_pairs_along),
	};
	return RUN(CASES, argc, argv);
}
