/* Memory regions: their keys, how many there are, and when one is in use. */
#define _DEFAULT_SOURCE 1 /* MAP_ANON */
#include "../providers/soft/memory.h"
#include "../providers/soft/soft.h"
#include "check.h"
#include "soft_side.h"

#include <errno.h>
#include <sys/mman.h>

static void test_keys(void) {
  const struct verbs *verbs = verbs_soft();
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  CHECK(!verbs->reg_mr(side.pd, NULL, 1, 0) && errno == EINVAL);
  CHECK(!verbs->reg_mr(side.pd, side.memory, 0, 0) && errno == EINVAL);
  CHECK(!verbs->reg_mr(side.pd, side.memory, SIZE_MAX, 0) && errno == EINVAL);
  CHECK(!verbs->reg_mr(side.pd, side.memory, 1, 1 << 30) && errno == EINVAL);
  CHECK(!verbs->reg_mr(side.pd, side.memory, 1, IBV_ACCESS_REMOTE_WRITE) && errno == EINVAL);

  /* A key dies with its region: the next one in the same place has another. */
  struct ibv_mr *mr = verbs->reg_mr(side.pd, side.memory, 64, 0);
  uint32_t stale = mr->lkey;
  uint64_t start = (uintptr_t)side.memory;
  CHECK(soft_find_mr(side.pd, stale, start, 64, 0));
  CHECK(!soft_find_mr(side.pd, stale, start, 65, 0));
  CHECK(!soft_find_mr(side.pd, stale, start - 1, 1, 0));
  CHECK(!soft_find_mr(side.pd, stale, start + 64, 1, 0));
  CHECK(!soft_find_mr(side.pd, stale, start + 1, UINT64_MAX, 0));
  CHECK(!soft_find_mr(side.pd, stale, start, 64, IBV_ACCESS_LOCAL_WRITE));
  CHECK_EQUAL(verbs->dereg_mr(mr), 0);
  mr = verbs->reg_mr(side.pd, side.memory, 64, 0);
  CHECK(mr->lkey != stale);
  CHECK(!soft_find_mr(side.pd, stale, start, 64, 0));
  struct ibv_pd *other = verbs->alloc_pd(side.context);
  CHECK(!soft_find_mr(other, mr->lkey, start, 64, 0));
  CHECK_EQUAL(verbs->dealloc_pd(other), 0);
  CHECK_EQUAL(verbs->dereg_mr(mr), 0);

  /* Not after a thousand more either, in one place. */
  for (int i = 0; i < 1000; i++) {
    mr = verbs->reg_mr(side.pd, side.memory, 64, 0);
    CHECK(mr && mr->lkey != stale);
    CHECK(!soft_find_mr(side.pd, stale, start, 64, 0));
    CHECK_EQUAL(verbs->dereg_mr(mr), 0);
  }
  side_close(&side);
}

/* As many regions as the device says, whatever the order in which they come and go. */
static void test_all_places(void) {
  const struct verbs *verbs = verbs_soft();
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  static struct ibv_mr *mrs[SOFT_MAX_MR - 1]; /* the side has one */
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < SOFT_MAX_MR - 1; i++) {
      if (!mrs[i]) mrs[i] = verbs->reg_mr(side.pd, side.memory + i, 1, 0);
      CHECK(mrs[i], "region %d of round %d: %s", i, round, strerror(errno));
    }
    CHECK(!verbs->reg_mr(side.pd, side.memory, 1, 0) && errno == ENOMEM);
    for (int i = 0; i < SOFT_MAX_MR - 1; i++) {
      CHECK(soft_find_mr(side.pd, mrs[i]->lkey, (uintptr_t)side.memory + (size_t)i, 1, 0) == soft_mr(mrs[i]));
      if (i % (round + 2) == 0) continue;
      CHECK_EQUAL(verbs->dereg_mr(mrs[i]), 0);
      mrs[i] = NULL;
    }
  }
  for (int i = 0; i < SOFT_MAX_MR - 1; i++)
    if (mrs[i]) CHECK_EQUAL(verbs->dereg_mr(mrs[i]), 0);
  side_close(&side);
}

/* Region `mr` and a region of the whole memory have receives, in turn: of 64 bytes, and one that needs no memory. */
static void post_receives(struct side *side, struct ibv_mr *mr) {
  struct ibv_mr *whole = side->mr;
  side->mr = mr;
  CHECK_EQUAL(side_receive(side, 1, 0, 64), 0);
  side->mr = whole;
  CHECK_EQUAL(side_receive(side, 2, 0, 64), 0);
  side->mr = mr;
  CHECK_EQUAL(side_receive(side, 3, 0, 64), 0);
  CHECK_EQUAL(side_receive(side, 4, 0, 0), 0);
  side->mr = whole;
}

static struct ibv_mr *open_busy(struct side *a, struct side *b) {
  side_open_pair(a, b, SIDE_DEFAULTS);
  struct ibv_mr *mr = verbs_soft()->reg_mr(b->pd, b->memory, 64, IBV_ACCESS_LOCAL_WRITE);
  CHECK(mr);
  post_receives(b, mr);
  CHECK_EQUAL(verbs_soft()->dereg_mr(mr), EBUSY);
  return mr;
}

static void test_busy_until_polled(void) {
  struct side a, b;
  struct ibv_mr *mr = open_busy(&a, &b);
  for (uint64_t i = 1; i <= 3; i++) {
    CHECK_EQUAL(side_send(&a, i, 0, 64, IBV_SEND_SIGNALED), 0);
    side_poll_one(&a, i, IBV_WC_SUCCESS);
    CHECK_EQUAL(verbs_soft()->dereg_mr(mr), EBUSY);
    side_poll_one(&b, i, IBV_WC_SUCCESS);
    CHECK_EQUAL(verbs_soft()->dereg_mr(mr), i < 3 ? EBUSY : 0);
  }
  CHECK_EQUAL(verbs_soft()->dereg_mr(b.mr), 0); /* so is the other; what needs no memory is still posted */
  b.mr = verbs_soft()->reg_mr(b.pd, b.memory, SIDE_BYTES, IBV_ACCESS_LOCAL_WRITE);
  side_close_pair(&a, &b);
}

static void test_busy_until_flushed(void) {
  struct side a, b;
  struct ibv_mr *mr = open_busy(&a, &b);
  CHECK_EQUAL(side_modify(b.qp, IBV_QPS_ERR, side_address(&a)), 0);
  CHECK_EQUAL(verbs_soft()->dereg_mr(mr), EBUSY);
  struct ibv_wc wc[4];
  side_poll(&b, wc, 4);
  CHECK_EQUAL(verbs_soft()->dereg_mr(mr), 0);
  side_close_pair(&a, &b);
}

static void test_busy_until_reset(void) {
  struct side a, b;
  struct ibv_mr *mr = open_busy(&a, &b);
  CHECK_EQUAL(side_send(&a, 1, 0, 64, 0), 0); /* arrived, but not polled */
  CHECK_EQUAL(side_modify(b.qp, IBV_QPS_RESET, side_address(&a)), 0);
  CHECK_EQUAL(verbs_soft()->dereg_mr(mr), 0);
  side_close_pair(&a, &b);
}

static void test_busy_until_destroyed(void) {
  struct side a, b;
  struct ibv_mr *mr = open_busy(&a, &b);
  CHECK_EQUAL(verbs_soft()->destroy_qp(b.qp), 0);
  CHECK_EQUAL(verbs_soft()->dereg_mr(mr), 0);
  b.qp = side_create_qp(&b, SIDE_DEFAULTS);
  side_close_pair(&a, &b);
}

/* A receive with a range beyond the region will fail: the region need not wait for it. */
static void test_not_busy_with_bad_receives(void) {
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  struct ibv_mr *whole = side.mr, *mr = verbs_soft()->reg_mr(side.pd, side.memory, 64, IBV_ACCESS_LOCAL_WRITE);
  CHECK_EQUAL(side_modify(side.qp, IBV_QPS_INIT, side_address(&side)), 0);
  side.mr = mr;
  CHECK_EQUAL(side_receive(&side, 1, 1, 64), 0);
  CHECK_EQUAL(verbs_soft()->dereg_mr(mr), 0);
  side.mr = whole;
  side_close(&side);
}

/* Registering is an entry in a table: memory that is gone, or was never there, does not matter until it is used. */
static void test_unmapped_memory(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  size_t bytes = 1 << 20;
  char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
  CHECK(memory != MAP_FAILED);
  struct ibv_mr *mr = verbs_soft()->reg_mr(a.pd, memory, bytes, 0);
  CHECK_EQUAL(munmap(memory, bytes), 0);
  CHECK(mr);
  CHECK_EQUAL(side_receive(&b, 1, 0, 64), 0);
  CHECK_EQUAL(side_send(&a, 1, 0, 64, IBV_SEND_SIGNALED), 0);
  side_poll_one(&a, 1, IBV_WC_SUCCESS);
  side_poll_one(&b, 1, IBV_WC_SUCCESS);
  CHECK_EQUAL(verbs_soft()->dereg_mr(mr), 0);
  side_close_pair(&a, &b);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"Keys", test_keys},
      {"AllPlaces", test_all_places},
      {"BusyUntilPolled", test_busy_until_polled},
      {"BusyUntilFlushed", test_busy_until_flushed},
      {"BusyUntilReset", test_busy_until_reset},
      {"BusyUntilDestroyed", test_busy_until_destroyed},
      {"NotBusyWithBadReceives", test_not_busy_with_bad_receives},
      {"UnmappedMemory", test_unmapped_memory},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
