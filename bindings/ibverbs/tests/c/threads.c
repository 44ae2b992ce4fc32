/* Threads post on one queue pair, poll one queue, and create and destroy objects concurrently. */
#include <pthread.h>
#include <stdatomic.h>

#include "kit.h"

enum { THREADS = 4, EACH = 400, ALL = THREADS * EACH };

static struct pair pair;
static atomic_int sent, received;
static atomic_uchar seen[ALL], sent_seen[ALL];

/* The number of a message is both its payload and its wr_id. */
static void *sender(void *index)
{
	uint64_t first = (uintptr_t)index * EACH;
	for (uint64_t number = first; number < first + EACH; number++) {
		struct ibv_sge own = { (uintptr_t)&number, sizeof number, 0 };
		struct ibv_send_wr wr = { .wr_id = number, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_INLINE,
					  .sg_list = &own, .num_sge = 1 };
		int error;
		while ((error = post(&pair.a, wr, 0, 8)) == ENOMEM)
			usleep(50); /* the queue is full */
		EQUAL(error, 0);
	}
	return NULL;
}

static void *send_poller(void *unused)
{
	struct ibv_wc wcs[8];
	double end = seconds() + PATIENCE_S;
	while (atomic_load(&sent) < ALL && seconds() < end) {
		int got = ibv_poll_cq(pair.a.cq, 8, wcs);
		CHECK(got >= 0);
		for (int i = 0; i < got; i++) {
			EQUAL(wcs[i].status, IBV_WC_SUCCESS);
			CHECK(wcs[i].wr_id < ALL && !atomic_exchange(&sent_seen[wcs[i].wr_id], 1));
		}
		atomic_fetch_add(&sent, got);
	}
	return unused;
}

/* The wr_id of a receive is its slot; it is posted again after it was read. */
static void *receiver(void *unused)
{
	struct ibv_wc wc;
	double end = seconds() + PATIENCE_S;
	while (atomic_load(&received) < ALL && seconds() < end) {
		int got = ibv_poll_cq(pair.b.cq, 1, &wc);
		CHECK(got >= 0);
		if (!got)
			continue;
		EQUAL(wc.status, IBV_WC_SUCCESS);
		uint64_t number;
		memcpy(&number, pair.b.bytes + wc.wr_id * 64, sizeof number);
		CHECK(number < ALL && !atomic_exchange(&seen[number], 1));
		EQUAL(post_receive(&pair.b, wc.wr_id, wc.wr_id * 64, 64), 0);
		atomic_fetch_add(&received, 1);
	}
	return unused;
}

/* Objects of the same device are created and destroyed meanwhile. */
static void *maker(void *unused)
{
	while (atomic_load(&received) < ALL) {
		struct side side = make_side(pair.context, IBV_QPT_UD);
		union ibv_gid group = { .raw = { [10] = 0xff, [11] = 0xff, 239, 17, 0, 2 } };
		to_init(side.qp);
		EQUAL(ibv_attach_mcast(side.qp, &group, 0), 0);
		struct ibv_comp_channel *channel = ibv_create_comp_channel(pair.context);
		struct ibv_cq *cq = ibv_create_cq(pair.context, 4, NULL, channel, 0);
		CHECK(channel && cq);
		EQUAL(ibv_destroy_cq(cq) | ibv_destroy_comp_channel(channel), 0);
		destroy_side(&side);
		usleep(500);
	}
	return unused;
}

static void all_messages_arrive_once(void)
{
	void *(*const bodies[])(void *) = { send_poller, send_poller, receiver, receiver, maker };
	enum { OTHERS = sizeof bodies / sizeof *bodies };
	pthread_t threads[THREADS + OTHERS];
	pair = make_pair(IBV_QPT_RC);
	EQUAL(ibv_resize_cq(pair.a.cq, ALL) | ibv_resize_cq(pair.b.cq, ALL), 0);
	for (int i = 0; i < DEPTH; i++)
		EQUAL(post_receive(&pair.b, i, i * 64, 64), 0);
	for (uintptr_t i = 0; i < THREADS; i++)
		EQUAL(pthread_create(&threads[i], NULL, sender, (void *)i), 0);
	for (int i = 0; i < OTHERS; i++)
		EQUAL(pthread_create(&threads[THREADS + i], NULL, bodies[i], NULL), 0);
	for (int i = 0; i < THREADS + OTHERS; i++)
		EQUAL(pthread_join(threads[i], NULL), 0);
	EQUAL(atomic_load(&sent), ALL);
	EQUAL(atomic_load(&received), ALL);
	destroy_pair(&pair);
}

/* Threads that build requests exclude each other: batches are never mixed. */
static void *batcher(void *index)
{
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(pair.a.qp);
	for (int i = 0; i < 50; i++) {
		unsigned char *place = pair.a.bytes + 64 * (uintptr_t)index;
		int error;
		do {
			ibv_wr_start(qp);
			for (int part = 0; part < 2; part++) {
				qp->wr_id = (uintptr_t)index;
				qp->wr_flags = IBV_SEND_SIGNALED;
				ibv_wr_rdma_write(qp, pair.b.mr->rkey,
						  (uintptr_t)pair.b.bytes + 64 * (uintptr_t)index + 32 * part);
				ibv_wr_set_sge(qp, pair.a.mr->lkey, (uintptr_t)place, 32);
			}
			error = ibv_wr_complete(qp);
			if (error == ENOMEM)
				usleep(50);
		} while (error == ENOMEM);
		EQUAL(error, 0);
	}
	return NULL;
}

static void batches_of_threads_do_not_mix(void)
{
	struct ibv_context *context = open_device();
	pair = (struct pair){ context, make_parts(context, NULL), make_side(context, IBV_QPT_RC) };
	struct ibv_qp_init_attr old = plan(pair.a.cq, IBV_QPT_RC);
	struct ibv_qp_init_attr_ex init = { .send_cq = pair.a.cq, .recv_cq = pair.a.cq, .cap = old.cap,
		.qp_type = IBV_QPT_RC, .pd = pair.a.pd, .send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS };
	CHECK(pair.a.qp = ibv_create_qp_ex(context, &init));
	connect_pair(pair.a.qp, pair.b.qp);
	EQUAL(ibv_resize_cq(pair.a.cq, ALL), 0);
	pthread_t threads[THREADS];
	for (uintptr_t i = 0; i < THREADS; i++) {
		memset(pair.a.bytes + 64 * i, i + 1, 64);
		EQUAL(pthread_create(&threads[i], NULL, batcher, (void *)i), 0);
	}
	for (int i = 0; i < THREADS * 50; i++) {
		uint64_t first = expect(pair.a.cq, IBV_WC_SUCCESS).wr_id;
		EQUAL(expect(pair.a.cq, IBV_WC_SUCCESS).wr_id, first); /* both of one batch */
	}
	for (int i = 0; i < THREADS; i++)
		EQUAL(pthread_join(threads[i], NULL), 0);
	for (int i = 0; i < THREADS; i++)
		CHECK(all_are(pair.b.bytes + 64 * i, 64, i + 1));
	destroy_pair(&pair);
}

/* An object destroyed while another thread uses it refuses that thread from then on. */
static atomic_int stop;

static void *careless(void *unused)
{
	struct ibv_wc wc;
	while (!atomic_load(&stop)) {
		struct ibv_send_wr wr = remote(IBV_WR_RDMA_WRITE, pair.b.bytes, 0);
		int error = post(&pair.a, wr, 0, 64);
		CHECK(!error || error == ENOMEM || error == EINVAL);
		error = post_receive(&pair.a, 1, 0, 64);
		CHECK(!error || error == ENOMEM || error == EINVAL);
		ibv_poll_cq(pair.a.cq, 1, &wc);
		error = ibv_req_notify_cq(pair.a.cq, 0);
		CHECK(!error || error == EINVAL);
		error = set_state(pair.a.qp, IBV_QPS_ERR);
		CHECK(!error || error == EINVAL);
	}
	return unused;
}

static void objects_may_end_while_they_are_used(void)
{
	for (int round = 0; round < 30; round++) {
		pthread_t threads[THREADS];
		pair = make_pair(IBV_QPT_RC);
		atomic_store(&stop, 0);
		for (int i = 0; i < THREADS; i++)
			EQUAL(pthread_create(&threads[i], NULL, careless, NULL), 0);
		usleep(500 * (round % 4));
		if (round % 2) /* otherwise closing the device destroys them */
			EQUAL(ibv_destroy_qp(pair.a.qp) | ibv_destroy_cq(pair.a.cq), 0);
		EQUAL(ibv_close_device(pair.context), 0);
		usleep(500);
		atomic_store(&stop, 1);
		for (int i = 0; i < THREADS; i++)
			EQUAL(pthread_join(threads[i], NULL), 0);
		free(pair.a.bytes);
		free(pair.b.bytes);
	}
}

int main(int argc, char **argv)
{
	static const struct test CASES[] = {
		CASE(all_messages_arrive_once),
		CASE(batches_of_threads_do_not_mix),
		CASE(objects_may_end_while_they_are_used),
	};
	return RUN(CASES, argc, argv);
}
