/* The view of /sys/class/infiniband, through every function of libc that takes a path. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "kit.h"

#include <dirent.h>
#include <ftw.h>
#include <limits.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/xattr.h>

#define CLASS "/sys/class/infiniband"
#define DEVICE CLASS "/dq_lo"
#define TYPE "node_type"
#define CA "1: CA\n"

static int holds(int fd, const char *text)
{
	char got[64] = { 0 };
	CHECK(fd >= 0);
	CHECK(read(fd, got, sizeof got - 1) >= 0);
	close(fd);
	return !strcmp(got, text);
}

static int stream_holds(FILE *file, const char *text)
{
	char got[64] = { 0 };
	CHECK(file);
	CHECK(fgets(got, sizeof got, file));
	fclose(file);
	return !strcmp(got, text);
}

static void files_are_opened(void)
{
	CHECK(holds(open(DEVICE "/" TYPE, O_RDONLY), CA));
	CHECK(holds(open64(DEVICE "/" TYPE, O_RDONLY), CA));
	CHECK(holds(openat(AT_FDCWD, DEVICE "/" TYPE, O_RDONLY), CA));
	CHECK(holds(openat64(-1, DEVICE "/" TYPE, O_RDONLY), CA));
	CHECK(holds(open("/sys//class/./infiniband/dq_lo/" TYPE, O_RDONLY), CA));
	CHECK(stream_holds(fopen(DEVICE "/" TYPE, "re"), CA));
	CHECK(stream_holds(freopen(DEVICE "/" TYPE, "re", fopen("/dev/null", "r")), CA));
	EQUAL(open(DEVICE "/none", O_RDONLY), -1);
	EQUAL(errno, ENOENT);
}

static void files_are_described(void)
{
	struct stat plain;
	struct statx extended;
	struct statfs fs;
	struct statvfs vfs;
	char value[64];
	EQUAL(stat(DEVICE, &plain), 0);
	CHECK(S_ISDIR(plain.st_mode));
	EQUAL(lstat(DEVICE "/" TYPE, &plain), 0);
	CHECK(S_ISREG(plain.st_mode));
	EQUAL(fstatat(AT_FDCWD, DEVICE, &plain, 0), 0);
	EQUAL(statx(AT_FDCWD, DEVICE, 0, STATX_BASIC_STATS, &extended), 0);
	CHECK(S_ISDIR(extended.stx_mode));
	EQUAL(access(DEVICE, R_OK) | eaccess(DEVICE, R_OK) | euidaccess(DEVICE, R_OK), 0);
	EQUAL(faccessat(AT_FDCWD, DEVICE, R_OK, 0), 0);
	EQUAL(statfs(DEVICE, &fs) | statvfs(DEVICE, &vfs), 0);
	CHECK(pathconf(DEVICE, _PC_NAME_MAX) > 0);
	/* The attribute does not exist, but the file does. */
	EQUAL(getxattr(DEVICE, "user.none", value, sizeof value), -1);
	CHECK(errno != ENOENT);
	EQUAL(lgetxattr(DEVICE, "user.none", value, sizeof value), -1);
	CHECK(errno != ENOENT);
	CHECK(listxattr(DEVICE, value, sizeof value) >= 0 || errno != ENOENT);
	CHECK(llistxattr(DEVICE, value, sizeof value) >= 0 || errno != ENOENT);
	int watch = inotify_init1(IN_CLOEXEC);
	CHECK(inotify_add_watch(watch, DEVICE, IN_OPEN) >= 0);
	close(watch);
}

static int visited;

static int visit(const char *path, const struct stat *found, int kind)
{
	(void)path, (void)found, (void)kind;
	visited++;
	return 0;
}

static int visit_with_depth(const char *path, const struct stat *found, int kind, struct FTW *place)
{
	(void)place;
	return visit(path, found, kind);
}

static void folders_are_listed(void)
{
	struct dirent **list;
	int devices = 0;
	DIR *dir = opendir(CLASS);
	CHECK(dir);
	for (struct dirent *entry; (entry = readdir(dir));)
		devices += !strncmp(entry->d_name, "dq_", 3);
	closedir(dir);
	EQUAL(devices, 1); /* the others are not in DQUANT_DEVICES */
	EQUAL(scandir(CLASS, &list, NULL, alphasort), 3);
	EQUAL(scandirat(AT_FDCWD, CLASS, &list, NULL, alphasort), 3);
	EQUAL(ftw(DEVICE "/ports", visit, 8), 0);
	CHECK(visited > 10);
	visited = 0;
	EQUAL(nftw(DEVICE "/ports", visit_with_depth, 8, FTW_PHYS), 0);
	CHECK(visited > 10);
}

static void links_are_read(void)
{
	char target[PATH_MAX] = { 0 }, *found;
	CHECK(readlink("/dev/infiniband/uverbs1", target, sizeof target) > 0);
	CHECK(!strcmp(target, "/dev/null"));
	CHECK(readlinkat(AT_FDCWD, "/dev/infiniband/uverbs1", target, sizeof target) > 0);
	EQUAL(readlink(DEVICE, target, sizeof target), -1);
	EQUAL(errno, EINVAL); /* it exists, but is not a link */
	CHECK(realpath(DEVICE, target));
	CHECK(found = realpath(DEVICE, NULL));
	CHECK(!strcmp(found, target));
	free(found);
	CHECK(found = canonicalize_file_name(DEVICE));
	CHECK(!strcmp(found, target));
	free(found);
}

static void relative_paths_lead_there(void)
{
	int class = open("/sys/class", O_RDONLY | O_DIRECTORY);
	CHECK(class >= 0);
	CHECK(holds(openat(class, "infiniband/dq_lo/" TYPE, O_RDONLY), CA));
	EQUAL(faccessat(class, "infiniband", R_OK, 0), 0);
	close(class);
	EQUAL(chdir("/sys/class"), 0);
	CHECK(holds(open("infiniband/dq_lo/" TYPE, O_RDONLY), CA));
	EQUAL(chdir("infiniband"), 0);
	CHECK(holds(open("dq_lo/" TYPE, O_RDONLY), CA));
	EQUAL(chdir(DEVICE), 0);
	CHECK(holds(open(TYPE, O_RDONLY), CA));
	EQUAL(chdir("/"), 0);
	CHECK(holds(open("sys/class/infiniband/dq_lo/" TYPE, O_RDONLY), CA));
	EQUAL(chdir(CLASS "/none"), -1);
	EQUAL(errno, ENOENT);
}

/* What ibstat, ibstatus, ibv_devinfo, hwloc and NCCL read. */
static void every_attribute_that_tools_read_is_there(void)
{
	static const char *const ATTRIBUTES[] = {
		"node_type", "node_desc", "node_guid", "sys_image_guid", "fw_ver", "hw_rev", "hca_type", "board_id",
		"parent", "uevent", "ports/1/state", "ports/1/phys_state", "ports/1/rate", "ports/1/link_layer",
		"ports/1/lid", "ports/1/sm_lid", "ports/1/sm_sl", "ports/1/lid_mask_count", "ports/1/cap_mask",
		"ports/1/pkeys/0", "ports/1/gids/0", "ports/1/gid_attrs/types/0", "ports/1/gid_attrs/ndevs/0",
		"device/numa_node",
	};
	char path[128], text[64];
	for (size_t at = 0; at < sizeof ATTRIBUTES / sizeof *ATTRIBUTES; at++) {
		snprintf(path, sizeof path, DEVICE "/%s", ATTRIBUTES[at]);
		FILE *file = fopen(path, "re");
		if (!file)
			fprintf(stderr, "%s\n", path);
		CHECK(file && fgets(text, sizeof text, file));
		CHECK(strlen(text) > 1 && text[strlen(text) - 1] == '\n');
		fclose(file);
	}
	CHECK(holds(open(DEVICE "/device/numa_node", O_RDONLY), "-1\n"));
	CHECK(holds(open(CLASS "_verbs/abi_version", O_RDONLY), "6\n"));
	struct ibv_context *context = open_device();
	struct ibv_device_attr attr;
	EQUAL(ibv_query_device(context, &attr), 0);
	strcat(attr.fw_ver, "\n");
	CHECK(holds(open(DEVICE "/fw_ver", O_RDONLY), attr.fw_ver));
	EQUAL(ibv_close_device(context), 0);
}

static void other_paths_are_left_alone(void)
{
	struct statx extended;
	EQUAL(statx(AT_FDCWD, "/sys/class/net/lo", 0, STATX_BASIC_STATS, &extended), 0);
	EQUAL(open("/sys/class/infiniband_none/x", O_RDONLY), -1);
	EQUAL(errno, ENOENT);
	EQUAL(openat(-1, "infiniband", O_RDONLY), -1);
	EQUAL(errno, EBADF);
}

int main(int argc, char **argv)
{
	static const struct test CASES[] = {
		CASE(files_are_opened),
		CASE(files_are_described),
		CASE(folders_are_listed),
		CASE(links_are_read),
		CASE(relative_paths_lead_there),
		CASE(every_attribute_that_tools_read_is_there),
		CASE(other_paths_are_left_alone),
	};
	return RUN(CASES, argc, argv);
}
