/* Children cannot use the parent's objects, but can open devices; the parent's connections survive. */
#include "kit.h"

#include <dirent.h>
#include <pthread.h>
#include <sys/socket.h>

/* Runs `body` in a child; it must return 0. */
static void in_child(int (*body)(struct pair *), struct pair *pair, int leave_by_exit)
{
	fflush(NULL);
	pid_t child = fork();
	CHECK(child >= 0);
	if (!child) {
		int status = body(pair);
		if (leave_by_exit)
			exit(status); /* runs handlers of the library, if any */
		_exit(status);
	}
	int status;
	EQUAL(waitpid(child, &status, 0), child);
	EQUAL(status, 0);
}

static void parent_goes_on(struct pair *pair, unsigned char value)
{
	memset(pair->a.bytes, value, 64);
	EQUAL(post_receive(&pair->b, 1, 4096, 64), 0);
	EQUAL(post(&pair->a, (struct ibv_send_wr){ .opcode = IBV_WR_SEND }, 0, 64), 0);
	expect(pair->a.cq, IBV_WC_SUCCESS);
	expect(pair->b.cq, IBV_WC_SUCCESS);
	CHECK(all_are(pair->b.bytes + 4096, 64, value));
}

/* How many sockets this process has. */
static int count_sockets(void)
{
	char link[300], name[300];
	int count = 0;
	struct dirent *entry;
	DIR *numbers = opendir("/proc/self/fd");
	CHECK(numbers);
	while ((entry = readdir(numbers))) {
		snprintf(name, sizeof name, "/proc/self/fd/%s", entry->d_name);
		ssize_t length = readlink(name, link, sizeof link);
		count += length > 7 && !memcmp(link, "socket:", 7);
	}
	closedir(numbers);
	return count;
}

/* How many a child has. */
static int sockets_of_a_child(void)
{
	int status;
	fflush(NULL);
	pid_t child = fork();
	CHECK(child >= 0);
	if (!child)
		_exit(count_sockets());
	EQUAL(waitpid(child, &status, 0), child);
	CHECK(WIFEXITED(status));
	return WEXITSTATUS(status);
}

/* The kernel would put packets for the parent's ports, and for those that all programs share, into buffers of the child. */
static void a_child_has_no_socket_of_the_device(void)
{
	int before = sockets_of_a_child();
	struct pair pair = make_pair(IBV_QPT_UD);
	union ibv_gid group = { .raw = { [10] = 0xff, [11] = 0xff, 239, 17, 0, 5 } };
	EQUAL(sockets_of_a_child(), before);
	int of_the_device = count_sockets();
	EQUAL(ibv_attach_mcast(pair.a.qp, &group, 0), 0);
	CHECK(count_sockets() > of_the_device && of_the_device > before);
	EQUAL(sockets_of_a_child(), before);
	EQUAL(ibv_detach_mcast(pair.a.qp, &group, 0), 0);
	/* A file of the program that gets the number of a closed socket stays open in the child. */
	int own = socket(AF_UNIX, SOCK_DGRAM, 0);
	CHECK(own >= 0);
	EQUAL(sockets_of_a_child(), before + 1);
	close(own);
	destroy_pair(&pair);
	EQUAL(sockets_of_a_child(), before);
}

/* Tries every kind of call. Returns the number of the first that was not refused. */
static int calls_everything(struct pair *pair)
{
	struct side *a = &pair->a;
	struct ibv_wc wc;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	struct ibv_qp_init_attr init = plan(a->cq, IBV_QPT_RC);
	struct ibv_async_event event;
	if (ibv_alloc_pd(a->context) || errno != ENODEV) return 1;
	if (post(a, (struct ibv_send_wr){ .opcode = IBV_WR_SEND }, 0, 64) != ENODEV) return 2;
	if (post_receive(a, 1, 0, 64) != ENODEV) return 3;
	if (ibv_poll_cq(a->cq, 1, &wc) >= 0) return 4;
	if (ibv_req_notify_cq(a->cq, 0) != ENODEV) return 5;
	if (ibv_modify_qp(a->qp, &attr, IBV_QP_STATE) != ENODEV) return 6;
	if (ibv_query_qp(a->qp, &attr, 0, &init) != ENODEV) return 7;
	if (ibv_dereg_mr(a->mr) != ENODEV) return 8;
	if (ibv_reg_mr(a->pd, a->bytes, 64, 0) || errno != ENODEV) return 9;
	if (ibv_get_async_event(a->context, &event) != -1 || errno != ENODEV) return 10;
	if (ibv_destroy_qp(a->qp) != ENODEV) return 11;
	if (ibv_destroy_cq(a->cq) != ENODEV) return 12;
	if (ibv_dealloc_pd(a->pd) != ENODEV) return 13;
	ibv_ack_cq_events(a->cq, 1);
	event = (struct ibv_async_event){ .event_type = IBV_EVENT_QP_FATAL, .element.qp = a->qp };
	ibv_ack_async_event(&event);
	if (ibv_close_device(a->context) != -1 || errno != ENODEV) return 14;
	if (a->cq->comp_events_completed) return 15;
	return 0;
}

static volatile int at_end;

static void *makes_and_destroys(void *pair)
{
	struct ibv_context *context = ((struct pair *)pair)->context;
	while (!at_end) {
		int count;
		struct ibv_device **list = ibv_get_device_list(&count);
		CHECK(list);
		ibv_free_device_list(list);
		struct ibv_pd *pd = ibv_alloc_pd(context);
		struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
		struct ibv_cq *cq = ibv_create_cq(context, DEPTH, NULL, channel, 0);
		CHECK(pd && cq);
		EQUAL(ibv_destroy_cq(cq) | ibv_destroy_comp_channel(channel) | ibv_dealloc_pd(pd), 0);
	}
	return NULL;
}

/* A child's own pair, on a device from the parent's list and on one from its own. */
static int opens_anew(struct pair *pair)
{
	for (int again = 0; again < 2; again++) {
		struct ibv_context *other = ibv_open_device(pair->context->device);
		CHECK(other);
		struct pair own = make_pair(IBV_QPT_RC);
		CHECK(own.a.qp->qp_num >> 16 != pair->a.qp->qp_num >> 16); /* not the parent's slot */
		parent_goes_on(&own, 0x33 + again);
		CHECK(!calls_everything(pair));
		destroy_pair(&own);
		EQUAL(ibv_close_device(other), 0);
	}
	CHECK(!ibv_alloc_pd(NULL));
	EQUAL(errno, EINVAL);
	return 0;
}

static int opens_anew_and_forks(struct pair *pair)
{
	struct pair own = make_pair(IBV_QPT_RC);
	parent_goes_on(&own, 0x35);
	in_child(opens_anew, &own, 1);
	in_child(calls_everything, pair, 0);
	parent_goes_on(&own, 0x36);
	destroy_pair(&own);
	return 0;
}

/* Connects a queue pair of the child to one of the parent. */
static void a_child_talks_to_its_parent(void)
{
	struct side side = make_side(open_device(), IBV_QPT_RC);
	int up[2], down[2], status;
	uint32_t number;
	EQUAL(pipe(up) | pipe(down), 0);
	pid_t child = fork();
	if (!child) {
		struct side own = make_side(open_device(), IBV_QPT_RC);
		CHECK(write(up[1], &own.qp->qp_num, 4) == 4 && read(down[0], &number, 4) == 4);
		to_init(own.qp);
		to_rts(own.qp, number);
		EQUAL(post_receive(&own, 1, 0, 64), 0);
		CHECK(write(up[1], "r", 1) == 1);
		expect(own.cq, IBV_WC_SUCCESS);
		CHECK(all_are(own.bytes, 64, 0x41));
		destroy_side(&own);
		EQUAL(ibv_close_device(own.context), 0);
		_exit(0);
	}
	CHECK(write(down[1], &side.qp->qp_num, 4) == 4 && read(up[0], &number, 4) == 4);
	to_init(side.qp);
	to_rts(side.qp, number);
	CHECK(read(up[0], &status, 1) == 1);
	memset(side.bytes, 0x41, 64);
	EQUAL(post(&side, (struct ibv_send_wr){ .opcode = IBV_WR_SEND }, 0, 64), 0);
	expect(side.cq, IBV_WC_SUCCESS);
	EQUAL(waitpid(child, &status, 0), child);
	EQUAL(status, 0);
	destroy_side(&side);
	EQUAL(ibv_close_device(side.context), 0);
}

static void a_child_opens_anew(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	parent_goes_on(&pair, 1);
	in_child(opens_anew, &pair, 0);
	parent_goes_on(&pair, 2);
	in_child(opens_anew_and_forks, &pair, 1);
	parent_goes_on(&pair, 3);
	destroy_pair(&pair);
}

/* Another thread may hold any lock when the process forks. */
static void a_child_of_busy_threads_opens_anew(void)
{
	enum { BUSY = 3 };
	pthread_t threads[BUSY];
	struct pair pair = make_pair(IBV_QPT_RC);
	for (int at = 0; at < BUSY; at++)
		EQUAL(pthread_create(&threads[at], NULL, makes_and_destroys, &pair), 0);
	for (int round = 0; round < 20; round++)
		in_child(opens_anew, &pair, round % 2);
	at_end = 1;
	for (int at = 0; at < BUSY; at++)
		EQUAL(pthread_join(threads[at], NULL), 0);
	destroy_pair(&pair);
}

static int writes_registered_memory(struct pair *pair)
{
	memset(pair->a.bytes, 0xee, BYTES);
	memset(pair->b.bytes, 0xee, BYTES);
	return 0;
}

static int does_nothing(struct pair *pair)
{
	(void)pair;
	return 0;
}

static void a_child_is_refused_and_the_parent_goes_on(void)
{
	EQUAL(ibv_fork_init(), 0);
	EQUAL(ibv_is_fork_initialized(), IBV_FORK_UNNEEDED);
	struct pair pair = make_pair(IBV_QPT_RC);
	parent_goes_on(&pair, 1);
	in_child(calls_everything, &pair, 0);
	parent_goes_on(&pair, 2);
	in_child(calls_everything, &pair, 1);
	parent_goes_on(&pair, 3);
	destroy_pair(&pair);
}

static void a_child_has_its_own_copy_of_the_memory(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	memset(pair.a.bytes, 0x21, BYTES);
	in_child(writes_registered_memory, &pair, 1);
	CHECK(all_are(pair.a.bytes, BYTES, 0x21) && all_are(pair.b.bytes, BYTES, 0));
	EQUAL(post(&pair.a, remote(IBV_WR_RDMA_WRITE, pair.b.bytes, pair.b.mr->rkey), 0, BYTES), 0);
	expect(pair.a.cq, IBV_WC_SUCCESS);
	CHECK(all_are(pair.b.bytes, BYTES, 0x21));
	destroy_pair(&pair);
}

/* While work is outstanding, children start and exit, and execute other programs. */
static void children_do_not_disturb_what_is_under_way(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	memset(pair.a.bytes, 0x23, BYTES);
	for (int i = 0; i < 20; i++) {
		struct ibv_send_wr wr = remote(IBV_WR_RDMA_WRITE, pair.b.bytes, pair.b.mr->rkey);
		EQUAL(post(&pair.a, wr, 0, BYTES), 0);
		in_child(does_nothing, &pair, i % 2);
		expect(pair.a.cq, IBV_WC_SUCCESS);
	}
	EQUAL(system("exit 3") >> 8, 3);
	CHECK(all_are(pair.b.bytes, BYTES, 0x23));
	destroy_pair(&pair);
}

/* The kernel closes descriptors; the parent must still be able to open the device again. */
static void a_child_that_outlives_the_parents_device_holds_nothing(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	int pipe_ends[2];
	char byte;
	EQUAL(pipe(pipe_ends), 0);
	pid_t child = fork();
	if (!child) {
		close(pipe_ends[1]);
		_exit(read(pipe_ends[0], &byte, 1) != 0); /* blocks until the parent closes its end */
	}
	close(pipe_ends[0]);
	destroy_pair(&pair);
	pair = make_pair(IBV_QPT_RC);
	parent_goes_on(&pair, 4);
	close(pipe_ends[1]);
	int status;
	EQUAL(waitpid(child, &status, 0), child);
	EQUAL(status, 0);
	destroy_pair(&pair);
}

int main(int argc, char **argv)
{
	static const struct test CASES[] = {
		CASE(a_child_is_refused_and_the_parent_goes_on),
		CASE(a_child_opens_anew),
		CASE(a_child_talks_to_its_parent),
		CASE(a_child_of_busy_threads_opens_anew),
		CASE(a_child_has_its_own_copy_of_the_memory),
		CASE(children_do_not_disturb_what_is_under_way),
		CASE(a_child_that_outlives_the_parents_device_holds_nothing),
		CASE(a_child_has_no_socket_of_the_device),
	};
	return RUN(CASES, argc, argv);
}
