/* Devices that cannot be opened: the library reports the reason on stderr; programs do not. */
#include "kit.h"

#include <stddef.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

enum { FEWEST_FILES = 3, MOST_FILES = 40, SAID_MAX = 8192 };

/* Lists and opens devices; those that open stay open. */
static struct ibv_context *try_to_open(void)
{
	int count = 0;
	struct ibv_device **list = ibv_get_device_list(&count);
	struct ibv_context *context = list && count ? ibv_open_device(list[count - 1]) : NULL;
	if (list)
		ibv_free_device_list(list);
	return context;
}

/* Runs in a child: whether a device opens with that many descriptors, and what is reported. */
static int opens_with(int files, char *said)
{
	int talk[2], status;
	EQUAL(pipe(talk), 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (!child) {
		struct rlimit limit = { files, files };
		dup2(talk[1], 2);
		close(talk[0]);
		close(talk[1]);
		if (setrlimit(RLIMIT_NOFILE, &limit))
			_exit(2);
		_exit(try_to_open() ? 0 : 1);
	}
	close(talk[1]);
	ssize_t got, length = 0;
	while ((got = read(talk[0], said + length, SAID_MAX - 1 - length)) > 0)
		length += got;
	said[length] = 0;
	close(talk[0]);
	EQUAL(waitpid(child, &status, 0), child);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) < 2);
	return WEXITSTATUS(status) == 0;
}

static void too_few_files_are_given_as_the_reason(void)
{
	static char said[SAID_MAX];
	int refusals = 0;
	for (int files = FEWEST_FILES; files <= MOST_FILES; files++) {
		if (opens_with(files, said))
			continue;
		const char *why = strstr(said, "libibverbs (dquant): ");
		if (!why || !strstr(why, "oo many open files") || !strstr(why, "hint: "))
			fprintf(stderr, "with %d files: %s\n", files, said);
		CHECK(why && strstr(why, "oo many open files") && strstr(why, "hint: "));
		refusals++;
	}
	CHECK(refusals > 2);
	CHECK(opens_with(MOST_FILES, said));
}

/* `dquant explain` finds processes by an abstract socket name, which any process may bind. */
static void a_name_that_is_taken_is_told(void)
{
	struct sockaddr_un name = { .sun_family = AF_UNIX };
	int length = sprintf(name.sun_path + 1, "dquant-verbs/%d", getpid()) + 1, talk[2];
	int taken = socket(AF_UNIX, SOCK_STREAM, 0), own = dup(2);
	EQUAL(bind(taken, (struct sockaddr *)&name, offsetof(struct sockaddr_un, sun_path) + length), 0);
	EQUAL(pipe(talk), 0);
	dup2(talk[1], 2);
	struct ibv_context *context = try_to_open();
	dup2(own, 2);
	CHECK(context); /* the device works without it */
	static char said[SAID_MAX];
	set_nonblocking(talk[0]);
	CHECK(read(talk[0], said, SAID_MAX - 1) > 0);
	CHECK(strstr(said, "dquant explain") && strstr(said, "hint: another process holds the name"));
	CHECK(strchr(said, '\n') == said + strlen(said) - 1);
	EQUAL(ibv_close_device(context), 0);
	close(taken);
}

/* Runs with invalid settings: the second device does not repeat the report. */
static void a_device_is_opened_twice(void)
{
	struct ibv_context *context = try_to_open();
	if (!context)
		return;
	EQUAL(ibv_close_device(context), 0);
	CHECK(context = try_to_open());
	EQUAL(ibv_close_device(context), 0);
}

int main(int argc, char **argv)
{
	static const struct test CASES[] = {
		CASE(too_few_files_are_given_as_the_reason),
		CASE(a_name_that_is_taken_is_told),
		CASE(a_device_is_opened_twice),
	};
	return RUN(CASES, argc, argv);
}
