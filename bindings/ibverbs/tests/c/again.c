/* Objects that are created and destroyed repeatedly leak no descriptors and little memory. */
#include "kit.h"

#include <pthread.h>
#include <sys/resource.h>

enum { ROUNDS = 200, FD_LIMIT = 64 };

static int open_now(void)
{
	int count = 0;
	for (int fd = 0; fd < 1024; fd++)
		count += fcntl(fd, F_GETFD) >= 0;
	return count;
}

/* The fewest of some looks: threads of the library have files open for a moment. */
static int open_fds(void)
{
	int fewest = open_now();
	for (int look = 0; look < 20; look++) {
		usleep(1000);
		int now = open_now();
		fewest = now < fewest ? now : fewest;
	}
	return fewest;
}

/* Waits until no more than `before` are open; a leak never gets there. */
static int fds_above(int before)
{
	int above = 0;
	for (int look = 0; look < 2000 && (above = open_now() - before) > 0; look++)
		usleep(1000);
	return above > 0 ? above : 0;
}

static long resident_bytes(void)
{
	long size, resident;
	FILE *file = fopen("/proc/self/statm", "re");
	CHECK(file && fscanf(file, "%ld %ld", &size, &resident) == 2);
	fclose(file);
	return resident * sysconf(_SC_PAGESIZE);
}

static void few_descriptors_may_be_open(void)
{
	struct rlimit limit = { FD_LIMIT, FD_LIMIT };
	EQUAL(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

static void devices_are_opened_again_and_again(void)
{
	few_descriptors_may_be_open();
	EQUAL(ibv_close_device(open_device()), 0);
	int before = open_fds(); /* includes the listener of `dquant explain`, which stays open */
	for (int round = 0; round < ROUNDS; round++) {
		struct ibv_context *context = open_device();
		CHECK(ibv_create_comp_channel(context)); /* destroyed with the device */
		EQUAL(ibv_close_device(context), 0);
	}
	EQUAL(fds_above(before), 0);
}

static void one_device_is_opened_by_many(void)
{
	struct ibv_context *first = open_device();
	few_descriptors_may_be_open();
	int before = open_fds();
	for (int round = 0; round < ROUNDS; round++) {
		struct ibv_context *other = open_device();
		EQUAL(ibv_close_device(other), 0);
		EQUAL(fds_above(before), 0);
	}
	EQUAL(ibv_close_device(first), 0);
}

static void channels_are_made_again_and_again(void)
{
	struct ibv_context *context = open_device();
	few_descriptors_may_be_open();
	int before = open_fds();
	for (int round = 0; round < ROUNDS; round++) {
		struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
		CHECK(channel);
		struct ibv_cq *cq = ibv_create_cq(context, DEPTH, NULL, channel, 0);
		CHECK(cq);
		EQUAL(ibv_destroy_comp_channel(channel), EBUSY);
		EQUAL(ibv_destroy_cq(cq) | ibv_destroy_comp_channel(channel), 0);
		EQUAL(fds_above(before), 0);
	}
	EQUAL(ibv_close_device(context), 0);
}

static void memory_of_inline_data_is_given_back(void)
{
	struct side side = make_parts(open_device(), NULL);
	struct ibv_qp_init_attr init = plan(side.cq, IBV_QPT_RC);
	(init.cap.max_send_wr = 8192, init.cap.max_inline_data = 512); /* 4 MiB */
	long before = resident_bytes();
	for (int round = 0; round < 40; round++) {
		struct ibv_qp *qp = ibv_create_qp(side.pd, &init);
		CHECK(qp);
		EQUAL(ibv_destroy_qp(qp), 0);
	}
	CHECK(resident_bytes() - before < 40 << 20); /* of 160 MiB */
	destroy_side(&side);
	EQUAL(ibv_close_device(side.context), 0);
}

static struct ibv_comp_channel *channel;

static void *wait_for_an_event(void *none)
{
	struct ibv_cq *cq;
	void *context;
	(void)none;
	int got = ibv_get_cq_event(channel, &cq, &context);
	return got == -1 && errno == EINVAL ? channel : NULL;
}

/* A waiting thread returns, and does not read from the next file that gets the descriptor. */
static void a_channel_goes_while_threads_wait(void)
{
	enum { WAITING = 4 };
	pthread_t threads[WAITING];
	struct ibv_context *context = open_device();
	for (int round = 0; round < 20; round++) {
		int ends[2];
		char bytes[16];
		CHECK(channel = ibv_create_comp_channel(context));
		for (int at = 0; at < WAITING; at++)
			EQUAL(pthread_create(&threads[at], NULL, wait_for_an_event, NULL), 0);
		usleep(round * 500); /* from before the wait to asleep */
		EQUAL(ibv_destroy_comp_channel(channel), 0);
		EQUAL(pipe(ends), 0);
		EQUAL(write(ends[1], "sixteen bytes ..", 16), 16);
		for (int at = 0; at < WAITING; at++) {
			void *result;
			EQUAL(pthread_join(threads[at], &result), 0);
			CHECK(result == channel);
		}
		EQUAL(read(ends[0], bytes, 16), 16);
		EQUAL(close(ends[0]) | close(ends[1]), 0);
	}
	EQUAL(ibv_close_device(context), 0);
}

int main(int argc, char **argv)
{
	static const struct test CASES[] = {
		CASE(memory_of_inline_data_is_given_back),
		CASE(a_channel_goes_while_threads_wait),
		CASE(devices_are_opened_again_and_again),
		CASE(one_device_is_opened_by_many),
		CASE(channels_are_made_again_and_again),
	};
	return RUN(CASES, argc, argv);
}
