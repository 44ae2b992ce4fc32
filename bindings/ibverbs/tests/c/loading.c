/* The library is loaded with dlopen, as plug-ins do, and unloaded while its threads may still run. */
#include "kit.h"

#include <dlfcn.h>

static void *library;

static void *symbol(const char *name)
{
	void *found = dlsym(library, name);
	if (!found)
		fprintf(stderr, "%s\n", dlerror());
	CHECK(found);
	return found;
}

#define CALL(name) ((__typeof__(&name))symbol(#name))

static struct ibv_context *open_by_hand(void)
{
	int count;
	CHECK(library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL));
	struct ibv_device **list = CALL(ibv_get_device_list)(&count);
	CHECK(list && count > 0);
	struct ibv_context *context = CALL(ibv_open_device)(list[count - 1]);
	CHECK(context);
	CALL(ibv_free_device_list)(list);
	return context;
}

static void a_loaded_library_works(void)
{
	struct ibv_context *context = open_by_hand();
	struct ibv_pd *pd = CALL(ibv_alloc_pd)(context);
	CHECK(pd);
	EQUAL(CALL(ibv_dealloc_pd)(pd), 0);
	EQUAL(CALL(ibv_close_device)(context), 0);
	EQUAL(dlclose(library), 0);
}

static void unloading_is_harmless(void)
{
	for (int round = 0; round < 3; round++) {
		struct ibv_context *context = open_by_hand();
		if (round != 1) /* the second time it stays open */
			EQUAL(CALL(ibv_close_device)(context), 0);
		EQUAL(dlclose(library), 0);
		void *still = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD);
		CHECK(still); /* the library stays loaded, because its threads still run */
		EQUAL(dlclose(still), 0);
		usleep(20000); /* a thread whose code was unmapped would crash now */
		pid_t child = fork(); /* and so would a fork handler */
		if (!child)
			_exit(0);
		int status;
		EQUAL(waitpid(child, &status, 0), child);
		EQUAL(status, 0);
	}
}

int main(int argc, char **argv)
{
	static const struct test CASES[] = {
		CASE(a_loaded_library_works),
		CASE(unloading_is_harmless),
	};
	return RUN(CASES, argc, argv);
}
