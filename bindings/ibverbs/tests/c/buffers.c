/* Registered buffers of other devices (dma-buf): from udmabuf or vgem, whichever this machine has. */
#define _GNU_SOURCE
#include <linux/udmabuf.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include "kit.h"

enum { PAGE = 4096, PAGES = 8, SIZE = PAGES * PAGE };

/* Of drm.h and drm_mode.h, which few machines have. */
struct create_dumb {
	uint32_t height, width, bits_per_pixel, flags, handle, pitch;
	uint64_t size;
};
struct prime_handle {
	uint32_t handle, flags;
	int32_t fd;
};
#define CREATE_DUMB _IOWR('d', 0xb2, struct create_dumb)
#define HANDLE_TO_FD _IOWR('d', 0x2d, struct prime_handle)

static int from_udmabuf(void)
{
	int device = open("/dev/udmabuf", O_RDWR | O_CLOEXEC);
	if (device < 0)
		return -1;
	int memory = memfd_create("pages", MFD_ALLOW_SEALING | MFD_CLOEXEC);
	EQUAL(ftruncate(memory, SIZE), 0);
	EQUAL(fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK), 0);
	struct udmabuf_create create = { .memfd = memory, .flags = UDMABUF_FLAGS_CLOEXEC, .size = SIZE };
	int fd = ioctl(device, UDMABUF_CREATE, &create);
	close(memory);
	close(device);
	return fd;
}

static int from_vgem(void)
{
	int device = open("/dev/dri/card0", O_RDWR | O_CLOEXEC);
	if (device < 0)
		return -1;
	struct create_dumb create = { .height = PAGES, .width = PAGE / 4, .bits_per_pixel = 32 };
	EQUAL(ioctl(device, CREATE_DUMB, &create), 0);
	CHECK(create.size >= SIZE);
	struct prime_handle prime = { .handle = create.handle, .flags = O_RDWR | O_CLOEXEC };
	EQUAL(ioctl(device, HANDLE_TO_FD, &prime), 0);
	close(device);
	return prime.fd;
}

static int make_buffer(void)
{
	int fd = from_udmabuf();
	if (fd < 0)
		fd = from_vgem();
	if (fd < 0)
		skip("this machine has neither /dev/udmabuf nor /dev/dri/card0");
	return fd;
}

static struct ibv_mr *reg(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd)
{
	return ibv_reg_dmabuf_mr(pd, offset, length, iova, fd, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
				 IBV_ACCESS_REMOTE_READ);
}

static void a_peer_writes_and_reads_a_buffer(void)
{
	int fd = make_buffer();
	struct pair pair = make_pair(IBV_QPT_RC);
	unsigned char *seen = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(seen != MAP_FAILED);
	char *iova = (char *)0x7000000000 + 64;
	struct ibv_mr *mr = reg(pair.b.pd, PAGE + 64, 2 * PAGE, (uintptr_t)iova, fd);
	CHECK(mr);
	CHECK((uintptr_t)mr->addr == PAGE + 64 && mr->length == 2 * PAGE && mr->pd == pair.b.pd);
	close(fd); /* the registration keeps the buffer */
	memset(seen, 0, SIZE);
	memset(pair.a.bytes, 0x5a, 2 * PAGE);
	EQUAL(post(&pair.a, remote(IBV_WR_RDMA_WRITE, iova, mr->rkey), 0, 2 * PAGE), 0);
	expect(pair.a.cq, IBV_WC_SUCCESS);
	CHECK(all_are(seen, PAGE + 64, 0) && all_are(seen + PAGE + 64, 2 * PAGE, 0x5a));
	CHECK(all_are(seen + 3 * PAGE + 64, SIZE - 3 * PAGE - 64, 0));
	memset(seen + PAGE + 64, 0x77, 100);
	EQUAL(post(&pair.a, remote(IBV_WR_RDMA_READ, iova, mr->rkey), 0, 200), 0);
	expect(pair.a.cq, IBV_WC_SUCCESS);
	CHECK(all_are(pair.a.bytes, 100, 0x77) && all_are(pair.a.bytes + 100, 100, 0x5a));
	/* The local side names bytes by the same addresses. */
	struct ibv_sge sge = { (uintptr_t)iova, 100, mr->lkey };
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND, .sg_list = &sge, .num_sge = 1 };
	EQUAL(post_receive(&pair.a, 1, 4096, 100), 0);
	EQUAL(post(&pair.b, wr, 0, 0), 0);
	expect(pair.b.cq, IBV_WC_SUCCESS);
	expect(pair.a.cq, IBV_WC_SUCCESS);
	CHECK(all_are(pair.a.bytes + 4096, 100, 0x77));
	EQUAL(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, pair.b.bytes, 64, 0), IBV_REREG_MR_ERR_CMD);
	EQUAL(errno, EOPNOTSUPP);
	/* One byte beyond. */
	EQUAL(post(&pair.a, remote(IBV_WR_RDMA_WRITE, iova + 2 * PAGE - 63, mr->rkey), 0, 64), 0);
	expect(pair.a.cq, IBV_WC_REM_ACCESS_ERR);
	EQUAL(ibv_dereg_mr(mr), 0);
	EQUAL(munmap(seen, SIZE), 0);
	destroy_pair(&pair);
}

static int mappings(void)
{
	int lines = 0, c;
	FILE *maps = fopen("/proc/self/maps", "r");
	CHECK(maps);
	while ((c = getc(maps)) != EOF)
		lines += c == '\n';
	fclose(maps);
	return lines;
}

static void a_region_that_ends_leaves_no_mapping(void)
{
	int fd = make_buffer(), before = mappings();
	struct side side = make_parts(open_device(), NULL);
	for (int i = 0; i < 200; i++) {
		struct ibv_mr *mr = reg(side.pd, 0, SIZE, 0, fd);
		CHECK(mr);
		EQUAL(ibv_dereg_mr(mr), 0);
	}
	CHECK(mappings() < before + 100);
	CHECK(reg(side.pd, 0, SIZE, 0, fd)); /* one is left to the device */
	close(fd);
	EQUAL(ibv_dealloc_pd(side.pd), EBUSY);
	EQUAL(ibv_close_device(side.context), 0);
	free(side.bytes);
}

static void what_a_buffer_does_not_have_is_refused(void)
{
	int fd = make_buffer();
	struct side side = make_parts(open_device(), NULL);
	struct {
		uint64_t offset, length, iova;
		int access;
	} bad[] = {
		{ 0, 0, 0, IBV_ACCESS_LOCAL_WRITE },
		{ 0, 64 << 20, 0, IBV_ACCESS_LOCAL_WRITE },
		{ 64 << 20, 64, 0, IBV_ACCESS_LOCAL_WRITE },
		{ UINT64_MAX - 63, 128, 4032, IBV_ACCESS_LOCAL_WRITE },
		{ 64, 64, 0, IBV_ACCESS_LOCAL_WRITE },  /* elsewhere in its page */
		{ 0, 64, 0, IBV_ACCESS_REMOTE_WRITE },  /* without local write */
		{ 0, 64, 0, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND },
		{ 0, 64, 0, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND },
	};
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		errno = 0;
		CHECK(!ibv_reg_dmabuf_mr(side.pd, bad[i].offset, bad[i].length, bad[i].iova, fd, bad[i].access));
		EQUAL(errno, EINVAL);
	}
	close(fd);
	destroy_side(&side);
	EQUAL(ibv_close_device(side.context), 0);
}

int main(int argc, char **argv)
{
	struct test cases[] = {
		CASE(a_peer_writes_and_reads_a_buffer),
		CASE(a_region_that_ends_leaves_no_mapping),
		CASE(what_a_buffer_does_not_have_is_refused),
	};
	return RUN(cases, argc, argv);
}
