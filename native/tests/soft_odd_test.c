/* The profile apple-odd, and faults that play awkward devices: each does what soft/emulation/device_profile.h and
 * soft/emulation/fault_injection.h say. */
#define _POSIX_C_SOURCE 200809L
#include "../providers/soft/soft.h"
#include "check.h"
#include "soft_apple.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>

#define WIDE (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE)

static struct side_options odd(uint32_t host) {
  struct side_options options = options_of(host);
  options.profile = "apple-odd";
  options.access = WIDE;
  return options;
}

static void to_init(struct side *side) {
  struct ibv_qp_attr attr = side_attr(IBV_QPS_INIT, side_address(side));
  CHECK_EQUAL(verbs_soft()->modify_qp(side->qp, &attr, INIT_MASK), ENOTSUP);
  attr.qp_access_flags = WIDE;
  CHECK_EQUAL(verbs_soft()->modify_qp(side->qp, &attr, INIT_MASK), 0);
}

static void connect_to(struct side *side, const struct side *peer) {
  CHECK_EQUAL(side_modify(side->qp, IBV_QPS_RTR, side_address(peer)), 0);
  CHECK_EQUAL(side_modify(side->qp, IBV_QPS_RTS, side_address(peer)), 0);
}

static void open_with(struct side_options options, struct side *a, struct side *b) {
  side_open(a, options);
  side_open(b, odd(1));
  to_init(a);
  to_init(b);
  connect_to(a, b);
  connect_to(b, a);
}

static void open_odd(struct side *a, struct side *b) { open_with(odd(0), a, b); }

static void test_access(void) {
  struct side side;
  side_open(&side, odd(0));
  errno = EINVAL;
  CHECK(!verbs_soft()->reg_mr(side.pd, side.memory, FRAME, IBV_ACCESS_LOCAL_WRITE) && errno == 0);
  to_init(&side);
  side_close(&side);
}

static void test_depth(void) {
  struct side side;
  struct ibv_qp_attr attr;
  struct ibv_qp_init_attr init;
  side_open(&side, odd(0));
  CHECK_EQUAL(verbs_soft()->query_qp(side.qp, &attr, IBV_QP_CAP, &init), EINVAL);
  to_init(&side);
  CHECK_EQUAL(verbs_soft()->query_qp(side.qp, &attr, IBV_QP_CAP, &init), 0);
  CHECK(attr.cap.max_send_wr == 0 && attr.cap.max_recv_wr == 0 && init.cap.max_send_wr == 0);
  side_close(&side);
}

static void test_length(void) {
  struct side a, b;
  open_odd(&a, &b);
  side_fill(a.memory, FRAME, 1);
  CHECK_EQUAL(side_receive(&b, 1, 0, FRAME), 0);
  CHECK_EQUAL(side_send(&a, 2, 0, FRAME, IBV_SEND_SIGNALED), 0);
  CHECK_EQUAL(side_poll_one(&b, 1, IBV_WC_SUCCESS).byte_len, 0);
  side_verify(b.memory, FRAME, 1);
  side_poll_one(&a, 2, IBV_WC_SUCCESS);
  side_close_pair(&a, &b);
}

/* Of the 1023 frames of the queue one is gone with each SEND that is not signaled, and none with the others. */
static void test_unsignaled(void) {
  struct side a, b;
  open_odd(&a, &b);
  for (int i = 0; i < 1022 + 1500; i++) {
    bool signaled = i >= 1022;
    CHECK_EQUAL(side_receive(&b, 1, 0, FRAME), 0);
    CHECK_EQUAL(side_send(&a, 2, 0, FRAME, signaled ? IBV_SEND_SIGNALED : 0), 0);
    side_poll_one(&b, 1, IBV_WC_SUCCESS);
    if (signaled) side_poll_one(&a, 2, IBV_WC_SUCCESS);
  }
  CHECK_EQUAL(side_receive(&b, 1, 0, FRAME), 0);
  CHECK_EQUAL(side_send(&a, 2, 0, FRAME, 0), 0);
  CHECK_EQUAL(side_send(&a, 2, 0, FRAME, 0), ENOMEM);
  side_poll_one(&b, 1, IBV_WC_SUCCESS);
  side_close_pair(&a, &b);
}

/* What the work request was for has happened, at both ends. */
static void test_lost_completions(void) {
  struct side a, b;
  open_odd(&a, &b);
  CHECK_EQUAL(verbs_soft()->inject(a.context, "lose_next=1"), 0);
  CHECK_EQUAL(verbs_soft()->inject(b.context, "lose_after=2"), 0);
  for (uint64_t i = 1; i <= 3; i++) {
    side_fill(a.memory, FRAME, (unsigned)i);
    CHECK_EQUAL(side_receive(&b, i, i * FRAME, FRAME), 0);
    CHECK_EQUAL(side_send(&a, i, 0, FRAME, IBV_SEND_SIGNALED), 0);
  }
  struct ibv_wc wc[2];
  side_poll(&a, wc, 2);
  CHECK(wc[0].wr_id == 2 && wc[1].wr_id == 3);
  side_poll(&b, wc, 2);
  CHECK(wc[0].wr_id == 1 && wc[1].wr_id == 3);
  for (unsigned i = 1; i <= 3; i++) side_verify(b.memory + i * FRAME, FRAME, i);
  CHECK(side_counters(&a).completions_lost_by_fault == 1 && side_counters(&b).completions_lost_by_fault == 1);
  side_close_pair(&a, &b);
}

/* A completion that is lost has been in the queue: the error comes no sooner, and no later, than without the fault. */
static void test_lost_completions_of_an_overrun(void) {
  for (int lost = 0; lost <= 2; lost++) {
    struct side a, b;
    struct side_options options = odd(0);
    options.cqe = 2;
    open_with(options, &a, &b);
    char list[32];
    snprintf(list, sizeof list, "lose_next=%d", lost);
    CHECK_EQUAL(verbs_soft()->inject(a.context, list), 0);
    CHECK_EQUAL(side_receive(&a, 9, 4 * FRAME, FRAME), 0); /* completes with an error after the overrun */
    for (uint64_t i = 1; i <= 3; i++) {
      CHECK_EQUAL(side_receive(&b, i, i * FRAME, FRAME), 0);
      CHECK_EQUAL(side_send(&a, i, 0, FRAME, IBV_SEND_SIGNALED), 0);
    }
    struct ibv_wc wc[4];
    CHECK_EQUAL(ibv_poll_cq(a.cq, 4, wc), 2 - lost);
    CHECK_EQUAL(ibv_poll_cq(a.cq, 4, wc), -EOVERFLOW);
    side_close_pair(&a, &b);
  }
}

static void test_bridge(void) {
  struct side a, b;
  side_open(&a, odd(0));
  side_open(&b, odd(1));
  to_init(&a);
  to_init(&b);
  CHECK_EQUAL(verbs_soft()->inject(a.context, "bridge=on"), 0);
  CHECK_EQUAL(verbs_soft()->inject(a.context, "bridge=maybe"), EINVAL);
  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_RTR, side_address(&b)), EINVAL);
  CHECK_EQUAL(verbs_soft()->inject(a.context, "bridge=off"), 0);
  connect_to(&a, &b);
  connect_to(&b, &a);
  side_close_pair(&a, &b);
}

/* A process of its own has some domains until it is killed, or gives them back. */
static void use_domains(struct side_options options, int count, bool killed) {
  pid_t child = fork();
  if (child == 0) {
    struct ibv_context *context = side_open_context(options);
    struct ibv_pd *pds[11];
    for (int i = 0; i < count; i++) CHECK((pds[i] = verbs_soft()->alloc_pd(context)));
    if (killed) raise(SIGKILL);
    for (int i = 0; i < count; i++) CHECK_EQUAL(verbs_soft()->dealloc_pd(pds[i]), 0);
    exit(verbs_soft()->close_device(context));
  }
  int status = check_wait(child);
  CHECK(killed ? WIFSIGNALED(status) : status == 0);
}

/* Eleven a device and host: those of killed processes stay in use until what plays a restart. */
static void test_domains(void) {
  char directory[] = "/tmp/mlxdist-test-XXXXXX", command[128];
  CHECK(mkdtemp(directory));
  setenv("XDG_RUNTIME_DIR", directory, 1);
  struct side_options options = odd(0), elsewhere = odd(1);
  for (int i = 0; i < 3; i++) use_domains(options, 11, false);
  use_domains(options, 4, true);
  use_domains(options, 7, true);
  struct ibv_context *context = side_open_context(options), *other = side_open_context(elsewhere);
  CHECK(!verbs_soft()->alloc_pd(context) && errno == ENOMEM);
  struct ibv_pd *pd = verbs_soft()->alloc_pd(other);
  CHECK(pd, "of another host: %s", strerror(errno));
  CHECK_EQUAL(verbs_soft()->dealloc_pd(pd), 0);
  snprintf(command, sizeof command, "rm %s/mlxdist-*-domain-*", directory);
  CHECK_EQUAL(system(command), 0);
  CHECK((pd = verbs_soft()->alloc_pd(context)), "after a restart: %s", strerror(errno));
  CHECK_EQUAL(verbs_soft()->dealloc_pd(pd), 0);
  CHECK(verbs_soft()->close_device(context) == 0 && verbs_soft()->close_device(other) == 0);
  snprintf(command, sizeof command, "ls %s | grep domain", directory);
  CHECK(system(command) != 0, "a domain is left");
  snprintf(command, sizeof command, "rm -r %s", directory);
  CHECK_EQUAL(system(command), 0);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"Access", test_access},
      {"Depth", test_depth},
      {"Length", test_length},
      {"Unsignaled", test_unsignaled},
      {"LostCompletions", test_lost_completions},
      {"LostCompletionsOfAnOverrun", test_lost_completions_of_an_overrun},
      {"Bridge", test_bridge},
      {"Domains", test_domains},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
