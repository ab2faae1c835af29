/* Many ranks: all of them connected to all, how many a device has room for, and what memory a queue pair takes. */
#define _DEFAULT_SOURCE 1 /* mincore */
#include "../providers/soft/soft.h"
#include "check.h"
#include "soft_side.h"

#include <errno.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#define RANKS 16
#define CHANNELS 2 /* queue pairs for each peer */
#define SLOTS 32
#define ROUNDS 5 /* of half the slots: the rings go round twice */
#define SLOT_BYTES 4096
#define WAIT_SECONDS 100

/* The heads with the first receives, and the first completions: two places of less than a page, each of which may lie
 * on the boundary of two. */
#define PAGES_PER_QP 4

static const struct side_options options = {.cqe = 4096, .max_send_wr = SLOTS, .max_recv_wr = SLOTS};

/* Bytes of the range for which the system has given memory. */
static size_t count_committed(void *memory, size_t bytes) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE), count = 0, pages = (bytes + page - 1) / page;
  unsigned char *resident = malloc(pages);
  CHECK(resident);
  CHECK_EQUAL(mincore(memory, bytes, (void *)resident), 0); /* void *: its type differs between systems */
  for (size_t i = 0; i < pages; i++) count += resident[i] & 1;
  free(resident);
  return count * page;
}

/* The memory of the first `queue_pairs` queue pairs, and that no other part of the rings has any. */
static void check_rings(const struct side *side, size_t queue_pairs) {
  struct segment_layout *layout = soft_context(side->context)->segment->layout;
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  size_t bytes = count_committed(layout, ARENA_OFFSET);
  CHECK(bytes > 0);
  CHECK(bytes <= (PAGES_PER_QP * queue_pairs + 1) * page, "%zu bytes for %zu queue pairs", bytes, queue_pairs);
}

/* A message says where it comes from, where it goes, and which one it is; its length differs from its neighbours'. */
struct message {
  int from, to, channel, number;
};

static size_t length_of(int number) {
  return sizeof(struct message) + (size_t)number * 37 % (SLOT_BYTES - sizeof(struct message));
}

struct world {
  _Atomic int arrived;
  struct side_address addresses[RANKS][RANKS][CHANNELS];
};

/* Returns when all ranks have called it `step` times. */
static void meet(struct world *world, int step) {
  time_t deadline = time(NULL) + WAIT_SECONDS;
  atomic_fetch_add(&world->arrived, 1);
  while (atomic_load(&world->arrived) < step * RANKS) {
    CHECK(time(NULL) < deadline, "step %d: %d have come", step, atomic_load(&world->arrived));
    sched_yield();
  }
}

struct rank {
  int number;
  struct side side; /* of which it uses the context, pd, cq, and memory of its own size */
  struct ibv_qp *qps[RANKS][CHANNELS];
};

static size_t slab_bytes(void) { return (size_t)RANKS * CHANNELS * (SLOTS + 1) * SLOT_BYTES; }

/* The slots of a queue pair, and behind them the one that it sends from. */
static char *slot_of(const struct rank *rank, int peer, int channel, int slot) {
  return rank->side.memory + ((size_t)(peer * CHANNELS + channel) * (SLOTS + 1) + (size_t)slot) * SLOT_BYTES;
}

static void open_rank(struct rank *rank, struct world *world) {
  const struct verbs *verbs = verbs_soft();
  struct side *side = &rank->side;
  side_open(side, options);
  CHECK_EQUAL(verbs->destroy_qp(side->qp), 0);
  CHECK_EQUAL(verbs->dereg_mr(side->mr), 0);
  verbs->free_memory(side->context, side->memory, SIDE_BYTES);
  side->memory = verbs->alloc_memory(side->context, slab_bytes());
  CHECK(side->memory, "alloc_memory: %s", strerror(errno));
  side->mr = verbs->reg_mr(side->pd, side->memory, slab_bytes(), IBV_ACCESS_LOCAL_WRITE);
  for (int peer = 0; peer < RANKS; peer++)
    for (int channel = 0; channel < CHANNELS && peer != rank->number; channel++) {
      struct ibv_qp *qp = rank->qps[peer][channel] = side_create_qp(side, options);
      CHECK(qp, "create_qp: %s", strerror(errno));
      world->addresses[rank->number][peer][channel] = (struct side_address){.gid = side->gid, .qp_num = qp->qp_num};
    }
}

static void post_slot(struct rank *rank, int peer, int channel, int slot) {
  rank->side.qp = rank->qps[peer][channel];
  size_t offset = (size_t)(slot_of(rank, peer, channel, slot) - rank->side.memory);
  uint64_t wr_id = (uint64_t)((peer * CHANNELS + channel) * SLOTS + slot);
  CHECK_EQUAL(side_receive(&rank->side, wr_id, offset, SLOT_BYTES), 0);
}

static void connect_rank(struct rank *rank, struct world *world) {
  for (int peer = 0; peer < RANKS; peer++)
    for (int channel = 0; channel < CHANNELS && peer != rank->number; channel++) {
      side_to_rts(rank->qps[peer][channel], world->addresses[peer][rank->number][channel]);
      for (int slot = 0; slot < SLOTS; slot++) post_slot(rank, peer, channel, slot);
    }
}

static void send_message(struct rank *rank, int peer, int channel, int number) {
  char *from = slot_of(rank, peer, channel, SLOTS);
  struct message message = {rank->number, peer, channel, number};
  side_fill(from, length_of(number), (unsigned)(rank->number + number));
  memcpy(from, &message, sizeof message);
  rank->side.qp = rank->qps[peer][channel];
  bool signaled = number % (SLOTS / 2) == SLOTS / 2 - 1;
  CHECK_EQUAL(side_send(&rank->side, UINT64_MAX, (size_t)(from - rank->side.memory), length_of(number),
                        signaled ? IBV_SEND_SIGNALED : 0),
              0);
}

static void take_message(struct rank *rank, const struct ibv_wc *wc, int received[RANKS][CHANNELS]) {
  int slot = (int)(wc->wr_id % SLOTS), channel = (int)(wc->wr_id / SLOTS % CHANNELS);
  int peer = (int)(wc->wr_id / SLOTS / CHANNELS), number = received[peer][channel]++;
  CHECK_EQUAL(slot, number % SLOTS);
  CHECK_EQUAL(wc->byte_len, length_of(number));
  char *at = slot_of(rank, peer, channel, slot);
  struct message expected = {peer, rank->number, channel, number}, message;
  memcpy(&message, at, sizeof message);
  CHECK(memcmp(&message, &expected, sizeof message) == 0, "message %d of rank %d", number, peer);
  side_fill(at, sizeof message, (unsigned)(peer + number));
  side_verify(at, length_of(number), (unsigned)(peer + number));
  post_slot(rank, peer, channel, slot);
}

/* Half the slots of every queue pair at once, then what came: no receive is missing. */
static void trade(struct rank *rank, struct world *world, int step) {
  int received[RANKS][CHANNELS] = {{0}};
  for (int round = 0; round < ROUNDS; round++) {
    for (int n = 0; n < SLOTS / 2; n++)
      for (int peer = 0; peer < RANKS; peer++)
        for (int channel = 0; channel < CHANNELS && peer != rank->number; channel++)
          send_message(rank, peer, channel, round * SLOTS / 2 + n);
    int missing = (RANKS - 1) * CHANNELS * (SLOTS / 2 + 1); /* and one completion of our own */
    for (time_t deadline = time(NULL) + WAIT_SECONDS; missing > 0;) {
      struct ibv_wc wc[64];
      int count = ibv_poll_cq(rank->side.cq, 64, wc);
      CHECK(count >= 0 && time(NULL) < deadline, "%d, %d completions missing", count, missing);
      for (int i = 0; i < count; i++) {
        CHECK_EQUAL(wc[i].status, IBV_WC_SUCCESS);
        if (wc[i].opcode & IBV_WC_RECV) take_message(rank, &wc[i], received);
      }
      missing -= count;
      if (count == 0) sched_yield();
    }
    meet(world, step + round);
  }
}

static void run_rank(int number, struct world *world) {
  struct rank rank = {.number = number};
  open_rank(&rank, world);
  meet(world, 1);
  connect_rank(&rank, world);
  meet(world, 2);
  trade(&rank, world, 3);

  struct verbs_counters counters = side_counters(&rank.side);
  CHECK_EQUAL(counters.dropped, 0);
  CHECK_EQUAL(counters.sends, (RANKS - 1) * CHANNELS * ROUNDS * SLOTS / 2);
  check_rings(&rank.side, (RANKS - 1) * CHANNELS);
  for (int peer = 0; peer < RANKS; peer++)
    for (int channel = 0; channel < CHANNELS && peer != number; channel++)
      CHECK_EQUAL(verbs_soft()->destroy_qp(rank.qps[peer][channel]), 0);
  CHECK_EQUAL(verbs_soft()->dereg_mr(rank.side.mr), 0);
  verbs_soft()->free_memory(rank.side.context, rank.side.memory, slab_bytes());
  CHECK_EQUAL(verbs_soft()->destroy_cq(rank.side.cq), 0);
  CHECK_EQUAL(verbs_soft()->dealloc_pd(rank.side.pd), 0);
  CHECK_EQUAL(verbs_soft()->close_device(rank.side.context), 0);
}

static void test_sixteen_processes(void) {
  struct world *world = mmap(NULL, sizeof *world, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANON, -1, 0);
  CHECK(world != MAP_FAILED);
  pid_t pids[RANKS];
  for (int number = 0; number < RANKS; number++) {
    pids[number] = fork();
    CHECK(pids[number] >= 0);
    if (pids[number]) continue;
    alarm(CHECK_SECONDS);
    run_rank(number, world);
    exit(0);
  }
  for (int number = 0; number < RANKS; number++) CHECK_EQUAL(check_wait(pids[number]), 0);
  CHECK_EQUAL(munmap(world, sizeof *world), 0);
}

/* A device has queue pairs for 32 peers; the next one is refused, and harms nothing. */
static void test_queue_pairs_run_out(void) {
  struct side side;
  side_open(&side, options);
  struct ibv_qp *first = side.qp, *more[SOFT_MAX_QP];
  int count = 0;
  while (count < SOFT_MAX_QP && (more[count] = side_create_qp(&side, options))) count++;
  CHECK_EQUAL(count, 32 * CHANNELS - 1);
  CHECK_EQUAL(errno, ENOMEM);
  struct ibv_device_attr device;
  CHECK_EQUAL(verbs_soft()->query_device(side.context, &device), 0);
  CHECK_EQUAL(device.max_qp, count + 1); /* so that a user can know before */

  for (int i = 0; i < count; i++) {
    side.qp = more[i];
    side_to_rts(side.qp, side_address(&side));
    for (uint64_t n = 0; n < 3 * SLOTS; n++) {
      CHECK_EQUAL(side_receive(&side, n, 0, 64), 0);
      CHECK_EQUAL(side_send(&side, n, 64, 64, IBV_SEND_SIGNALED), 0);
      struct ibv_wc wc[2];
      side_poll(&side, wc, 2);
    }
  }
  check_rings(&side, SOFT_MAX_QP);
  for (int i = 0; i < count; i++) CHECK_EQUAL(verbs_soft()->destroy_qp(more[i]), 0);
  side.qp = first;
  side_close(&side);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"SixteenProcesses", test_sixteen_processes},
      {"QueuePairsRunOut", test_queue_pairs_run_out},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
