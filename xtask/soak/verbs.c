/*
 * One side of a pair of verbs programs for `cargo xtask soak`; docs/soak.md says what it is for.
 *
 *   verbs listen|connect SOCKET SEED poll|event|mixed MAX_BYTES LANES ITERATIONS KINDS
 *
 * Each lane is a thread with a queue pair, connected to that of the same number in the other process; all of them
 * connect at the same moment. On even lanes the process that connects begins, on odd ones the other. Both draw the
 * same schedule from SEED: which kind of request comes next (KINDS: any of s, w, m, r, a; m is a SEND after each WRITE), how many at once, and how long. So
 * everybody knows every byte that has to arrive. A SEND of no bytes ends a lane.
 *
 * stdout: `p N N -`, messages checked so far by each lane, `-` for those that have ended; at the end `done MESSAGES
 * BYTES`. stdin: a line asks the lanes to end early; its end ends the process. Exit status: 0 good, 4 a wrong byte, 5 the other process is
 * gone, 6 a request failed although it is there, 7 no set-up.
 */
#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

enum { WRONG = 4, GONE = 5, FAILED = 6, SETUP = 7 };
enum { MAX_LANES = 8, DEPTH = 16, NOTE = 64, NOTES_BYTES = 4096, LOOK_MS = 50, SPIN_NS = 50000, LATE_US = 1000, ASK_EVERY = 4 };
enum mode { POLL, EVENT, MIXED };

/* What the other side needs to know of a lane. */
struct card {
	uint32_t qpn, psn, rkey;
	uint64_t address;
	union ibv_gid gid;
};

struct lane {
	int number, begins; /* whether this side sends the requests */
	uint64_t draws;     /* state of the schedule; the same on both sides */
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	unsigned char *memory; /* see `area` */
	size_t length;
	struct card mine, theirs;
	int sends, arrived, armed; /* SENDs and other requests in flight; receives that completed unasked */
	struct ibv_wc early[2 * DEPTH];
	uint64_t word, bytes;
	_Atomic uint64_t messages;
	_Atomic int ended;
	pthread_t thread;
};

static struct lane lanes[MAX_LANES];
static int lane_count, control, connects;
static enum mode mode;
static size_t slot, depth;
static uint64_t iterations;
static const char *kinds;
static _Atomic int gone, stop;
static pthread_barrier_t together;

static _Noreturn void leave(int status, const char *format, ...)
{
	va_list list;
	va_start(list, format);
	vfprintf(stderr, format, list);
	va_end(list);
	fputc('\n', stderr);
	fflush(stderr);
	_exit(status);
}

#define NEED(condition) \
	do { \
		if (!(condition)) \
			leave(SETUP, "%s:%d: %s: %s", __FILE__, __LINE__, #condition, strerror(errno)); \
	} while (0)

/* Waits a while for the other side's end, which explains a failed request. */
static _Noreturn void failed(const struct lane *lane, const char *what)
{
	for (int look = 0; look < 40 && !gone; look++)
		usleep(LOOK_MS * 1000);
	leave(gone ? GONE : FAILED, "lane %d: %s%s", lane->number, what, gone ? ", the other process is gone" : "");
}

/* ---- the schedule and the bytes ---------------------------------------------------------------- */

static uint64_t mixed(uint64_t x)
{
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
	return x ^ (x >> 31);
}

static uint64_t draw(struct lane *lane)
{
	return mixed(lane->draws += 0x9e3779b97f4a7c15ull);
}

/* Lengths of all magnitudes up to the slot's, and often exactly a power of two or next to it. */
static size_t draw_length(struct lane *lane)
{
	int bits = 0;
	while ((slot >> bits) > 1)
		bits++;
	size_t power = (size_t)1 << draw(lane) % (bits + 1);
	switch (draw(lane) % 4) {
	case 0: return power;
	case 1: return power > 1 ? power - 1 : 1;
	case 2: return power < slot ? power + 1 : slot;
	default: return 1 + draw(lane) % slot;
	}
}

/* What comes next. */
struct step {
	uint64_t key; /* of its bytes */
	char kind;
	size_t burst;
	int late; /* the receives come after the answer */
};

/* READs and atomics are not seen by the side that answers, so every few steps are messages. */
static struct step draw_step(struct lane *lane, uint64_t number)
{
	struct step step = { .key = draw(lane) };
	step.kind = kinds[draw(lane) % strlen(kinds)];
	if (number % ASK_EVERY == ASK_EVERY - 1 && strchr("ra", step.kind))
		step.kind = 's';
	step.burst = 1 + draw(lane) % depth;
	step.late = draw(lane) % 16 == 0;
	return step;
}

static uint64_t word_at(uint64_t key, size_t at)
{
	return (key + at) * 0x9e3779b97f4a7c15ull;
}

static void fill(unsigned char *to, size_t length, uint64_t key)
{
	size_t words = length / 8;
	for (size_t at = 0; at < words; at++) {
		uint64_t word = word_at(key, at);
		memcpy(to + 8 * at, &word, 8);
	}
	uint64_t word = word_at(key, words);
	memcpy(to + 8 * words, &word, length % 8);
}

static void check(struct lane *lane, const char *what, const unsigned char *got, size_t length, uint64_t key)
{
	for (size_t at = 0; at * 8 < length; at++) {
		uint64_t word = word_at(key, at);
		size_t rest = length - 8 * at < 8 ? length - 8 * at : 8;
		if (memcmp(got + 8 * at, &word, rest))
			leave(WRONG, "lane %d: %s: wrong bytes at %zu of %zu: %02x, not %02x", lane->number, what,
			      8 * at, length, got[8 * at], (unsigned char)word);
	}
	lane->bytes += length;
	lane->messages++;
}

/* Parts of a lane's memory: notes of both directions and the word of the atomics on the first page, then the slots of the
 * side that begins, or the three kinds of slots of the side that answers. */
enum part { NOTES, WORD, SENT, RECEIVED = SENT, WRITTEN, READ_FROM };

static size_t area(enum part part, size_t at)
{
	return part < SENT ? part * 2 * DEPTH * NOTE + at * NOTE : NOTES_BYTES + ((part - SENT) * depth + at) * slot;
}

/* The key of the bytes that may be READ: they never change. */
static uint64_t read_key(const struct lane *lane)
{
	return mixed(lane->number + 77);
}

/* ---- requests and completions ------------------------------------------------------------------ */

static void post_receive(struct lane *lane, size_t at)
{
	/* Only messages arrive at the side that answers; notes at the other. */
	size_t length = lane->begins ? NOTE : slot;
	size_t from = lane->begins ? area(NOTES, at) : area(RECEIVED, at);
	struct ibv_sge sge = { (uintptr_t)lane->memory + from, length, lane->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = at, .sg_list = &sge, .num_sge = 1 }, *bad;
	if (ibv_post_recv(lane->qp, &wr, &bad))
		failed(lane, "a receive is refused");
}

/* One request: of its own bytes, to the other side's, and what an atomic adds. */
static void post(struct lane *lane, enum ibv_wr_opcode opcode, size_t from, size_t length, size_t to, uint64_t add)
{
	struct ibv_sge sge = { (uintptr_t)lane->memory + from, length, lane->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 1000, .sg_list = &sge, .num_sge = length > 0, .opcode = opcode,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = lane->theirs.address + to;
		wr.wr.atomic.compare_add = add;
		wr.wr.atomic.rkey = lane->theirs.rkey;
	} else {
		wr.wr.rdma.remote_addr = lane->theirs.address + to;
		wr.wr.rdma.rkey = lane->theirs.rkey;
	}
	int error = ibv_post_send(lane->qp, &wr, &bad);
	if (error) {
		errno = error;
		failed(lane, "a request is refused");
	}
	lane->sends++;
}

static uint64_t now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ull + now.tv_nsec;
}

/* Sleeps on the channel. A look at `gone` never polls the queue: that would hide a wake-up that is lost. */
static void sleep_on_channel(struct lane *lane)
{
	if (!lane->armed) {
		NEED(!ibv_req_notify_cq(lane->cq, 0));
		lane->armed = 1;
		return;
	}
	struct pollfd look = { .fd = lane->channel->fd, .events = POLLIN };
	if (poll(&look, 1, LOOK_MS) != 1) {
		if (gone && !lane->sends)
			leave(GONE, "lane %d: the other process is gone", lane->number);
		return;
	}
	struct ibv_cq *cq;
	void *context;
	NEED(!ibv_get_cq_event(lane->channel, &cq, &context));
	ibv_ack_cq_events(cq, 1);
	lane->armed = 0;
}

/* The next completion. */
static struct ibv_wc next(struct lane *lane)
{
	struct ibv_wc wc;
	uint64_t spins_until = mode == EVENT ? 0 : mode == MIXED ? now_ns() + SPIN_NS : UINT64_MAX;
	int must_look = 1;
	for (;;) {
		int got = must_look ? ibv_poll_cq(lane->cq, 1, &wc) : 0;
		if (got > 0)
			break;
		if (got < 0)
			failed(lane, "the completion queue cannot be polled");
		if (spins_until == UINT64_MAX || (spins_until && now_ns() < spins_until)) {
			if (gone && !lane->sends)
				leave(GONE, "lane %d: the other process is gone", lane->number);
			continue;
		}
		int was_armed = lane->armed;
		sleep_on_channel(lane);
		/* Armed just now, or woken. */
		must_look = was_armed != lane->armed;
	}
	if (wc.status)
		failed(lane, ibv_wc_status_str(wc.status));
	return wc;
}

/* Until nothing is in flight; receives that complete meanwhile are kept. */
static void await_requests(struct lane *lane)
{
	while (lane->sends) {
		struct ibv_wc wc = next(lane);
		if (wc.opcode & IBV_WC_RECV)
			lane->early[lane->arrived++] = wc;
		else
			lane->sends--;
	}
}

static struct ibv_wc await_receive(struct lane *lane)
{
	if (lane->arrived) {
		struct ibv_wc wc = lane->early[0];
		memmove(lane->early, lane->early + 1, --lane->arrived * sizeof wc);
		return wc;
	}
	for (;;) {
		struct ibv_wc wc = next(lane);
		if (wc.opcode & IBV_WC_RECV)
			return wc;
		lane->sends--;
	}
}

/* ---- the side that begins ---------------------------------------------------------------------- */

static void await_answer(struct lane *lane, uint64_t key)
{
	await_requests(lane);
	struct ibv_wc wc = await_receive(lane);
	if (wc.byte_len != NOTE)
		leave(WRONG, "lane %d: an answer of %u bytes", lane->number, wc.byte_len);
	check(lane, "answer", lane->memory + area(NOTES, wc.wr_id), NOTE, ~key);
	post_receive(lane, wc.wr_id);
}

static void begin_reads(struct lane *lane, size_t burst)
{
	size_t lengths[DEPTH], offsets[DEPTH];
	for (size_t at = 0; at < burst; at++) {
		lengths[at] = draw_length(lane);
		offsets[at] = (draw(lane) % (depth * slot - lengths[at] + 1)) & ~(size_t)7;
		memset(lane->memory + area(SENT, at), 0, lengths[at] < 64 ? lengths[at] : 64);
		post(lane, IBV_WR_RDMA_READ, area(SENT, at), lengths[at], area(READ_FROM, 0) + offsets[at], 0);
	}
	await_requests(lane);
	for (size_t at = 0; at < burst; at++)
		check(lane, "READ", lane->memory + area(SENT, at), lengths[at], read_key(lane) + offsets[at] / 8);
}

static void begin_atomics(struct lane *lane, size_t burst)
{
	uint64_t add[DEPTH], got;
	for (size_t at = 0; at < burst; at++) {
		add[at] = draw(lane);
		post(lane, IBV_WR_ATOMIC_FETCH_AND_ADD, area(NOTES, DEPTH + at), 8, area(WORD, 0), add[at]);
	}
	await_requests(lane);
	for (size_t at = 0; at < burst; at++) {
		memcpy(&got, lane->memory + area(NOTES, DEPTH + at), 8);
		if (got != lane->word)
			leave(WRONG, "lane %d: an atomic returned %llx, not %llx", lane->number,
			      (unsigned long long)got, (unsigned long long)lane->word);
		lane->word += add[at];
		lane->bytes += 8;
		lane->messages++;
	}
}

static void post_note(struct lane *lane, size_t at, uint64_t key)
{
	fill(lane->memory + area(NOTES, DEPTH + at), NOTE, key + at);
	post(lane, IBV_WR_SEND, area(NOTES, DEPTH + at), NOTE, 0, 0);
}

static void begin_messages(struct lane *lane, char kind, size_t burst, uint64_t key)
{
	enum ibv_wr_opcode opcode = kind == 's' ? IBV_WR_SEND : IBV_WR_RDMA_WRITE;
	for (size_t at = 0; at < burst; at++) {
		size_t length = draw_length(lane);
		fill(lane->memory + area(SENT, at), length, key + at);
		post(lane, opcode, area(SENT, at), length, area(WRITTEN, at), 0);
		if (kind == 'm')
			post_note(lane, at, key);
	}
	if (kind == 'w')
		post_note(lane, 0, key);
	await_answer(lane, key);
}

static void begin(struct lane *lane)
{
	for (uint64_t i = 0; i < iterations && !stop; i++) {
		struct step step = draw_step(lane, i);
		if (step.kind == 'r')
			begin_reads(lane, step.burst);
		else if (step.kind == 'a')
			begin_atomics(lane, step.burst);
		else
			begin_messages(lane, step.kind, step.burst, step.key);
	}
	post(lane, IBV_WR_SEND, 0, 0, 0, 0);
	await_requests(lane);
}

/* ---- the side that answers --------------------------------------------------------------------- */

/* Takes one message; returns 0 when it is the last one. */
static int take(struct lane *lane, size_t length, const char *what, uint64_t key, size_t *at)
{
	struct ibv_wc wc = await_receive(lane);
	*at = wc.wr_id;
	if (!wc.byte_len)
		return 0;
	if (wc.byte_len != length)
		leave(WRONG, "lane %d: %s of %u bytes, not %zu", lane->number, what, wc.byte_len, length);
	check(lane, what, lane->memory + area(RECEIVED, *at), length, key);
	return 1;
}

/* Each message has the next receive, and gets it back before the answer or, to be late, after it. */
static int answer_messages(struct lane *lane, const struct step *step)
{
	int sends = step->kind == 's';
	size_t lengths[DEPTH], taken[DEPTH], count = step->kind == 'w' ? 1 : step->burst;
	for (size_t at = 0; at < step->burst; at++)
		lengths[at] = draw_length(lane);
	for (size_t at = 0; at < count; at++) {
		size_t length = sends ? lengths[at] : NOTE;
		if (!take(lane, length, sends ? "SEND" : "note", step->key + at, &taken[at]))
			return 0;
	}
	for (size_t at = 0; !sends && at < step->burst; at++)
		check(lane, "WRITE", lane->memory + area(WRITTEN, at), lengths[at], step->key + at);
	for (size_t at = 0; !step->late && at < count; at++)
		post_receive(lane, taken[at]);
	fill(lane->memory + area(NOTES, 0), NOTE, ~step->key);
	post(lane, IBV_WR_SEND, area(NOTES, 0), NOTE, 0, 0);
	await_requests(lane);
	if (step->late)
		usleep(LATE_US);
	for (size_t at = 0; step->late && at < count; at++)
		post_receive(lane, taken[at]);
	return 1;
}

static void answer(struct lane *lane)
{
	for (uint64_t i = 0;; i++) {
		struct step step = draw_step(lane, i);
		/* What the other side draws for requests that need no answer. */
		for (size_t at = 0; strchr("ra", step.kind) && at < step.burst; at++) {
			if (step.kind == 'r')
				draw_length(lane);
			draw(lane);
		}
		if (strchr("swm", step.kind) && !answer_messages(lane, &step))
			return;
	}
}

/* ---- set-up ------------------------------------------------------------------------------------ */

static struct ibv_context *open_loopback(void)
{
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);
	NEED(list && count > 0);
	struct ibv_context *context = ibv_open_device(list[count - 1]);
	NEED(context);
	ibv_free_device_list(list);
	return context;
}

static void make_lane(struct lane *lane, struct ibv_context *context, struct ibv_pd *pd, uint64_t seed)
{
	const int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
			   IBV_ACCESS_REMOTE_ATOMIC;
	lane->number = lane - lanes;
	lane->begins = connects == !(lane->number % 2);
	lane->draws = mixed(seed + lane->number);
	lane->length = lane->begins ? area(SENT, depth) : area(READ_FROM, depth);
	lane->memory = mmap(NULL, lane->length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	NEED(lane->memory != MAP_FAILED);
	if (!lane->begins)
		fill(lane->memory + area(READ_FROM, 0), depth * slot, read_key(lane));
	NEED(lane->mr = ibv_reg_mr(pd, lane->memory, lane->length, rights));
	NEED(lane->channel = ibv_create_comp_channel(context));
	NEED(lane->cq = ibv_create_cq(context, 8 * DEPTH, NULL, lane->channel, 0));
	struct ibv_qp_init_attr init = { .send_cq = lane->cq, .recv_cq = lane->cq, .qp_type = IBV_QPT_RC,
		.cap = { 4 * DEPTH, 4 * DEPTH, 1, 1, 0 } };
	NEED(lane->qp = ibv_create_qp(pd, &init));
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = rights };
	NEED(!ibv_modify_qp(lane->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	for (size_t at = 0; at < depth; at++)
		post_receive(lane, at);
	lane->mine = (struct card){ .qpn = lane->qp->qp_num, .psn = mixed(seed ^ getpid()) & 0xffffff,
				    .rkey = lane->mr->rkey, .address = (uintptr_t)lane->memory };
	NEED(!ibv_query_gid(context, 1, 0, &lane->mine.gid));
}

static void connect_lane(struct lane *lane)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_4096,
		.dest_qp_num = lane->theirs.qpn, .rq_psn = lane->theirs.psn, .max_dest_rd_atomic = 4,
		.min_rnr_timer = 12, .ah_attr = { .is_global = 1, .port_num = 1,
			.grh = { .dgid = lane->theirs.gid, .hop_limit = 4 } } };
	NEED(!ibv_modify_qp(lane->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
			    IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .sq_psn = lane->mine.psn, .timeout = 14,
		.retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4 };
	NEED(!ibv_modify_qp(lane->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			    IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC));
}

static void *run_lane(void *argument)
{
	struct lane *lane = argument;
	pthread_barrier_wait(&together);
	connect_lane(lane);
	pthread_barrier_wait(&together);
	pthread_barrier_wait(&together);
	if (lane->begins)
		begin(lane);
	else
		answer(lane);
	lane->ended = 1;
	return NULL;
}

/* ---- the connection to the other side, and to the soak ------------------------------------------- */

static void meet(const char *path)
{
	struct sockaddr_un name = { .sun_family = AF_UNIX };
	strncpy(name.sun_path, path, sizeof name.sun_path - 1);
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	NEED(fd >= 0);
	if (connects) {
		while (connect(fd, (struct sockaddr *)&name, sizeof name))
			usleep(5000);
		control = fd;
		return;
	}
	NEED(!bind(fd, (struct sockaddr *)&name, sizeof name) && !listen(fd, 1));
	control = accept(fd, NULL, NULL);
	NEED(control >= 0);
	close(fd);
	unlink(path);
}

static void swap(const void *mine, void *theirs, size_t length)
{
	if (write(control, mine, length) != (ssize_t)length ||
	    recv(control, theirs, length, MSG_WAITALL) != (ssize_t)length)
		leave(GONE, "the other process is gone");
}

static void swap_byte(void)
{
	char mine = 'r', theirs;
	swap(&mine, &theirs, 1);
}

/* One line if something changed. Returns whether all lanes have ended. */
static int report(void)
{
	static char last[MAX_LANES * 24];
	char line[MAX_LANES * 24] = "p";
	int running = 0;
	for (int at = 0; at < lane_count; at++) {
		char *end = line + strlen(line);
		running += !lanes[at].ended;
		if (lanes[at].ended)
			strcpy(end, " -");
		else
			sprintf(end, " %llu", (unsigned long long)lanes[at].messages);
	}
	if (strcmp(line, last)) {
		puts(line);
		fflush(stdout);
		strcpy(last, line);
	}
	return !running;
}

/* Until all lanes have ended: reports, notices the other side's end, and a line of the soak. */
static void watch(void)
{
	struct pollfd looks[] = { { .fd = control, .events = POLLIN }, { .fd = 0, .events = POLLIN } };
	while (!report()) {
		char byte;
		poll(looks, 2, LOOK_MS);
		/* The other side says nothing any more: this is its end. */
		if (looks[0].revents) {
			gone = 1;
			looks[0].fd = -1;
		}
		if (looks[1].revents) {
			stop = 1;
			if (read(0, &byte, 1) <= 0)
				looks[1].fd = -1;
		}
	}
}

int main(int argc, char **argv)
{
	NEED(argc == 9);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	signal(SIGPIPE, SIG_IGN);
	connects = !strcmp(argv[1], "connect");
	uint64_t seed = strtoull(argv[3], NULL, 10);
	mode = !strcmp(argv[4], "poll") ? POLL : !strcmp(argv[4], "event") ? EVENT : MIXED;
	slot = strtoull(argv[5], NULL, 10);
	slot = slot < NOTE ? NOTE : slot;
	depth = slot > (1 << 20) ? 2 : slot > (64 << 10) ? 4 : DEPTH;
	lane_count = atoi(argv[6]);
	iterations = strtoull(argv[7], NULL, 10);
	kinds = argv[8];
	NEED(lane_count >= 1 && lane_count <= MAX_LANES && strlen(kinds) > 0);
	struct ibv_context *context = open_loopback();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	NEED(pd);
	for (int at = 0; at < lane_count; at++)
		make_lane(&lanes[at], context, pd, seed);
	meet(argv[2]);
	for (int at = 0; at < lane_count; at++)
		swap(&lanes[at].mine, &lanes[at].theirs, sizeof(struct card));
	NEED(!pthread_barrier_init(&together, NULL, lane_count + 1));
	for (int at = 0; at < lane_count; at++)
		NEED(!pthread_create(&lanes[at].thread, NULL, run_lane, &lanes[at]));
	swap_byte();
	pthread_barrier_wait(&together);
	pthread_barrier_wait(&together);
	swap_byte();
	pthread_barrier_wait(&together);
	watch();
	uint64_t messages = 0, bytes = 0;
	for (int at = 0; at < lane_count; at++) {
		pthread_join(lanes[at].thread, NULL);
		messages += lanes[at].messages;
		bytes += lanes[at].bytes;
	}
	printf("done %llu %llu\n", (unsigned long long)messages, (unsigned long long)bytes);
	fflush(stdout);
	/* Acknowledgements may still be due: the process stays until it is told. */
	char byte;
	while (read(0, &byte, 1) > 0)
		;
	return 0;
}
