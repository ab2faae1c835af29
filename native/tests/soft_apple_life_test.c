/* The profile apple-tb5, from the first connection to the end: regions, cables, and the order in which things go. */
#define _POSIX_C_SOURCE 200809L
#include "../providers/soft/soft.h"
#include "check.h"
#include "soft_apple.h"

#include <errno.h>

/* Regions are mapped when the queue pair comes to RTR: later ones do not work with it, neither way. */
static void test_late_region(void) {
  struct side a, b;
  for (int receives = 0; receives < 2; receives++) {
    open_connected(&a, &b);
    struct side *late = receives ? &b : &a;
    struct ibv_mr *mr = late->mr;
    late->mr = verbs_soft()->reg_mr(late->pd, late->memory, FRAME, IBV_ACCESS_LOCAL_WRITE);
    CHECK_EQUAL(side_receive(&b, 1, 0, FRAME), 0);
    CHECK_EQUAL(side_send(&a, 2, 0, FRAME, 0), 0);
    side_poll_one(late, receives ? 1 : 2, IBV_WC_LOC_PROT_ERR);
    CHECK_EQUAL(side_state(late->qp), IBV_QPS_ERR);
    /* After RESET it comes to RTR again. */
    CHECK_EQUAL(side_modify(a.qp, IBV_QPS_RESET, side_address(&b)), 0);
    CHECK_EQUAL(side_modify(b.qp, IBV_QPS_RESET, side_address(&a)), 0);
    side_connect(&a, &b);
    CHECK_EQUAL(side_receive(&b, 3, 0, FRAME), 0);
    CHECK_EQUAL(side_send(&a, 4, 0, FRAME, 0), 0);
    side_poll_one(&b, 3, IBV_WC_SUCCESS);
    struct ibv_mr *mapped = late->mr;
    late->mr = mr;
    CHECK_EQUAL(verbs_soft()->dereg_mr(mapped), EBUSY);
    CHECK_EQUAL(verbs_soft()->destroy_qp(late->qp), 0);
    CHECK_EQUAL(verbs_soft()->dereg_mr(mapped), 0);
    CHECK((late->qp = side_create_qp(late, options_of(0))));
    side_close_pair(&a, &b);
  }
}

/* A region is not given back under a queue pair that has mapped it, and RESET unmaps nothing; one that came later goes
 * at any time. */
static void test_mapped_region(void) {
  struct side a, b;
  open_connected(&a, &b);
  struct ibv_mr *late = verbs_soft()->reg_mr(a.pd, a.memory, FRAME, IBV_ACCESS_LOCAL_WRITE);
  CHECK_EQUAL(verbs_soft()->dereg_mr(a.mr), EBUSY);
  CHECK_EQUAL(verbs_soft()->dereg_mr(late), 0);
  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_RESET, side_address(&b)), 0);
  CHECK_EQUAL(verbs_soft()->dereg_mr(a.mr), EBUSY);
  side_close_pair(&a, &b);
}

/* Queue pair, region, completion queue, domain, context: what comes before its turn is refused. */
static void test_order_of_the_end(void) {
  const struct verbs *verbs = verbs_soft();
  struct side a, b;
  open_connected(&a, &b);
  CHECK_EQUAL(verbs->close_device(a.context), EBUSY);
  CHECK_EQUAL(verbs->dealloc_pd(a.pd), EBUSY);
  CHECK_EQUAL(verbs->destroy_cq(a.cq), EBUSY);
  CHECK_EQUAL(verbs->dereg_mr(a.mr), EBUSY);
  CHECK_EQUAL(verbs->destroy_qp(a.qp), 0);
  CHECK_EQUAL(verbs->destroy_cq(a.cq), EBUSY);
  CHECK_EQUAL(verbs->dereg_mr(a.mr), 0);
  CHECK_EQUAL(verbs->dealloc_pd(a.pd), EBUSY);
  CHECK_EQUAL(verbs->destroy_cq(a.cq), 0);
  CHECK_EQUAL(verbs->close_device(a.context), EBUSY);
  CHECK_EQUAL(verbs->dealloc_pd(a.pd), 0);
  verbs->free_memory(a.context, a.memory, SIDE_BYTES);
  CHECK_EQUAL(verbs->close_device(a.context), 0);
  side_close(&b);
}

/* A boundary of 4 GiB within a region is silent corruption on the device. */
static void test_boundary(void) {
  const struct verbs *verbs = verbs_soft();
  struct side side;
  side_open(&side, options_of(0));
  CHECK((uintptr_t)side.memory >> 32 == ((uintptr_t)side.memory + SEGMENT_BYTES / 2) >> 32);
  char *boundary = (char *)(((uintptr_t)side.memory >> 32 << 32) + (UINT64_C(1) << 32)); /* nothing is read there */
  const int access = IBV_ACCESS_LOCAL_WRITE;
  struct ibv_mr *below = verbs->reg_mr(side.pd, boundary - SEGMENT_PAGE, SEGMENT_PAGE, access);
  struct ibv_mr *above = verbs->reg_mr(side.pd, boundary, SEGMENT_PAGE, access);
  CHECK(below && above);
  CHECK(!verbs->reg_mr(side.pd, boundary - SEGMENT_PAGE, SEGMENT_PAGE + 1, access) && errno == EINVAL);
  CHECK(!verbs->reg_mr(side.pd, boundary, (UINT64_C(1) << 32) + 1, access) && errno == EINVAL);
  CHECK(verbs->dereg_mr(below) == 0 && verbs->dereg_mr(above) == 0);
  side_close(&side);
}

/* A device is one end of one cable: only the peer at the other end is reached, and it is opened once. */
static void test_one_cable(void) {
  struct side a, b, c, twice;
  open_connected(&a, &b);
  side_open(&c, options_of(2));
  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_RESET, side_address(&b)), 0);
  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_INIT, side_address(&c)), 0);
  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_RTR, side_address(&c)), ETIMEDOUT);
  CHECK_EQUAL(side_state(a.qp), IBV_QPS_INIT);
  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_RTR, side_address(&b)), 0);

  twice = (struct side){.context = side_open_context(options_of(0))};
  CHECK(!verbs_soft()->alloc_pd(twice.context) && errno == EBUSY);
  CHECK_EQUAL(verbs_soft()->close_device(twice.context), 0);
  side_close(&c);
  side_close_pair(&a, &b);
}

static void connect_with_mtu(struct side *side, const struct side *peer, enum ibv_mtu port, enum ibv_mtu good) {
  CHECK_EQUAL(side_modify(side->qp, IBV_QPS_INIT, side_address(peer)), 0);
  struct ibv_qp_attr attr = side_attr(IBV_QPS_RTR, side_address(peer));
  attr.path_mtu = port;
  CHECK_EQUAL(verbs_soft()->modify_qp(side->qp, &attr, RTR_MASK), EINVAL);
  attr.path_mtu = good;
  CHECK_EQUAL(verbs_soft()->modify_qp(side->qp, &attr, RTR_MASK), 0);
  CHECK_EQUAL(side_modify(side->qp, IBV_QPS_RTS, side_address(peer)), 0);
}

/* macOS 26.2 takes messages of one frame. What sources disagree on is here the other way: regions need all flags, and
 * the path MTU of the port is refused. */
static void test_one_frame(void) {
  struct side a, b;
  struct ibv_port_attr port;
  struct side_options options = options_of(0);
  options.profile = "apple-tb5-26.2";
  options.access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
  side_open(&a, options);
  options.host++;
  side_open(&b, options);
  CHECK(!verbs_soft()->reg_mr(a.pd, a.memory, FRAME, IBV_ACCESS_LOCAL_WRITE) && errno == EINVAL);
  connect_with_mtu(&a, &b, IBV_MTU_4096, IBV_MTU_1024);
  connect_with_mtu(&b, &a, IBV_MTU_2048, IBV_MTU_1024);
  CHECK_EQUAL(verbs_soft()->query_port(a.context, 1, &port), 0);
  CHECK_EQUAL(port.max_msg_sz, FRAME);
  CHECK_EQUAL(side_receive(&b, 1, 0, FRAME), 0);
  CHECK_EQUAL(side_send(&a, 2, 0, FRAME + 1, 0), EINVAL);
  CHECK_EQUAL(side_send(&a, 2, 0, FRAME, 0), 0);
  side_poll_one(&b, 1, IBV_WC_SUCCESS);
  side_close_pair(&a, &b);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"LateRegion", test_late_region}, {"MappedRegion", test_mapped_region}, {"OrderOfTheEnd", test_order_of_the_end},
      {"Boundary", test_boundary},      {"OneCable", test_one_cable},         {"OneFrame", test_one_frame},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
