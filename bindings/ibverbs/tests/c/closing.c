/* Daemons close every unknown descriptor, including the library's. Closing the device must still work. */
#include "kit.h"

#include <sys/resource.h>

enum { HIGHEST_FD = 255, CLOSE_LIMIT_S = 5 };

/* Like closefrom(3), which not every C library has. */
static void close_everything(void)
{
	for (int fd = 3; fd <= HIGHEST_FD; fd++)
		close(fd);
}

/* Reuses every freed descriptor number for another file. */
static void open_others(int *others, int count)
{
	for (int at = 0; at < count; at++)
		CHECK((others[at] = open("/dev/null", O_RDWR)) >= 0);
}

static double processor_seconds(void)
{
	struct rusage used;
	EQUAL(getrusage(RUSAGE_SELF, &used), 0);
	return used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

static void close_in_time(struct ibv_context *context)
{
	double begun = seconds();
	EQUAL(ibv_close_device(context), 0);
	CHECK(seconds() - begun < CLOSE_LIMIT_S);
}

static void an_idle_device_is_closed(void)
{
	struct ibv_context *context = open_device();
	usleep(50000); /* its thread is asleep by now */
	close_everything();
	close_in_time(context);
}

static void queue_pairs_at_work_are_closed(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	CHECK(ibv_create_comp_channel(pair.context));
	close_everything();
	for (int request = 0; request < DEPTH; request++)
		post(&pair.a, remote(IBV_WR_RDMA_WRITE, pair.b.bytes, pair.b.mr->rkey), 0, 1024);
	usleep(200000);
	close_in_time(pair.context);
}

static void nothing_spins_without_descriptors(void)
{
	struct ibv_context *context = open_device();
	close_everything();
	usleep(600000); /* the longest sleep that may have begun before */
	double before = processor_seconds();
	usleep(500000);
	CHECK(processor_seconds() - before < 0.1);
	close_in_time(context);
}

static void what_took_their_places_is_left_alone(void)
{
	int others[32];
	struct ibv_context *context = open_device();
	close_everything();
	open_others(others, 32);
	usleep(50000);
	close_in_time(context);
	for (int at = 0; at < 32; at++)
		EQUAL(close(others[at]), 0);
}

static void a_device_can_be_opened_again(void)
{
	struct pair pair = make_pair(IBV_QPT_RC);
	post(&pair.a, remote(IBV_WR_RDMA_WRITE, pair.b.bytes, pair.b.mr->rkey), 0, 1024);
	expect(pair.a.cq, IBV_WC_SUCCESS);
	destroy_pair(&pair);
}

int main(int argc, char **argv)
{
	static const struct test CASES[] = {
		CASE(an_idle_device_is_closed),
		CASE(queue_pairs_at_work_are_closed),
		CASE(nothing_spins_without_descriptors),
		CASE(what_took_their_places_is_left_alone),
		CASE(a_device_can_be_opened_again),
	};
	return RUN(CASES, argc, argv);
}
