/* The probe of a device finds the limits of each profile, and gives back all that it makes, whatever fails. */
#include "probe.h"

#include "../providers/soft/soft.h"
#include "check.h"
#include "device.h"

#include <errno.h>

static uint32_t host; /* of this run alone: queue pairs are shared by all processes of a host */
static char calls[16384];

static void note(const char *call, const char *device) {
  CHECK(strcmp(device, "soft0") == 0, "%s", device);
  size_t length = strlen(calls);
  if (length + strlen(call) + 2 < sizeof calls) snprintf(calls + length, sizeof calls - length, "%s ", call);
}

static int count(const char *call) {
  int found = 0;
  for (const char *at = calls; (at = strstr(at, call)); at += strlen(call)) found++;
  return found;
}

static struct ibv_context *open_first(const struct verbs *verbs) {
  int devices = 0;
  struct ibv_device **list = verbs->get_device_list(&devices);
  CHECK(list && devices > 0);
  struct ibv_context *context = verbs->open_device(list[0]);
  CHECK(context);
  verbs->free_device_list(list);
  verbs->set_virtual_host(context, host);
  return context;
}

/* The provider refuses to close a device with anything left, but for regions and queue pairs of no domain. */
static void close_empty(const struct verbs *verbs, struct ibv_context *context) {
  const struct soft_context *soft = soft_context(context);
  CHECK_EQUAL(soft->mr_count, 0);
  for (int i = 0; i < SOFT_MAX_QP; i++) CHECK(!soft->qps[i], "queue pair %d is left", i);
  CHECK_EQUAL(verbs->close_device(context), 0);
}

static mlxdist_probe probe_with(const struct verbs *verbs) {
  mlxdist_probe result;
  struct ibv_context *context = open_first(verbs);
  probe_device(verbs, context, note, &result);
  close_empty(verbs, context);
  return result;
}

static void test_profiles(void) {
  for (int i = 0; i < SOFT_PROFILES; i++) {
    const struct soft_profile *profile = &soft_profiles[i];
    bool apple = profile->frames;
    mlxdist_probe result = probe_with(verbs_soft_profile(profile->name));
    CHECK(!*result.error, "%s: %s", profile->name, result.error);
    CHECK(result.uc && !result.rc, "%s", profile->name);
    CHECK_EQUAL(result.queue_pairs, apple ? profile->max_qp : MLXDIST_PROBE_QUEUE_PAIRS);
    CHECK_EQUAL(result.queue_pair_errno, !apple ? 0 : profile->shares_qp ? EBUSY : ENOMEM);
    CHECK_EQUAL(result.receives, 4095);
    CHECK_EQUAL(result.inline_bytes, 0);
    CHECK_EQUAL(result.regions, apple ? 100 : MLXDIST_PROBE_REGIONS);
    CHECK_EQUAL(result.region_bytes, profile->max_mr_size ? profile->max_mr_size : MLXDIST_PROBE_REGION_BYTES);
    CHECK_EQUAL(result.region_local, profile->region_access != ACCESS_REMOTE);
    CHECK_EQUAL(result.region_remote, profile->region_access != ACCESS_LOCAL);
    CHECK_EQUAL(result.queue_pair_local, profile->queue_pair_access != ACCESS_REMOTE);
    CHECK(result.queue_pair_remote, "%s", profile->name);
    CHECK_EQUAL(result.kept, 0);
  }
}

/* The number of calls of the provider is bounded: a probe takes milliseconds. */
static void test_calls(void) {
  for (int i = 0; i < SOFT_PROFILES; i++) {
    *calls = '\0';
    probe_with(verbs_soft_profile(soft_profiles[i].name));
    CHECK_EQUAL(count("ibv_alloc_pd "), 1);
    CHECK_EQUAL(count("ibv_create_cq "), 1);
    CHECK_EQUAL(count("ibv_modify_qp "), 2);
    CHECK(count("ibv_create_qp ") <= 2 + MLXDIST_PROBE_QUEUE_PAIRS + 13 + 5 + 2, "%d", count("ibv_create_qp "));
    CHECK(count("ibv_reg_mr ") <= 2 + 12 + MLXDIST_PROBE_REGIONS, "%d", count("ibv_reg_mr "));
    CHECK(count("ibv_destroy_qp ") <= count("ibv_create_qp ") && count("ibv_dereg_mr ") <= count("ibv_reg_mr "));
  }
}

/* A provider one of whose functions fails from its n-th call on. */

static struct verbs failing;
static const struct verbs *soft;
static int left;

static bool fails(void) {
  errno = EIO;
  return left-- <= 0;
}

static struct ibv_pd *alloc_pd(struct ibv_context *context) { return fails() ? NULL : soft->alloc_pd(context); }
static struct ibv_cq *create_cq(struct ibv_context *context, int cqe, void *of, struct ibv_comp_channel *channel,
                                int vector) {
  return fails() ? NULL : soft->create_cq(context, cqe, of, channel, vector);
}
static struct ibv_qp *create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr) {
  return fails() ? NULL : soft->create_qp(pd, attr);
}
static int modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask) {
  return fails() ? EIO : soft->modify_qp(qp, attr, mask);
}
static struct ibv_mr *reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access) {
  return fails() ? NULL : soft->reg_mr(pd, addr, length, access);
}

static void fail_from(int call) {
  soft = verbs_soft_profile("apple-tb5-27");
  failing = *soft;
  left = call;
}

static void test_domain_that_fails(void) {
  fail_from(0);
  failing.alloc_pd = alloc_pd;
  mlxdist_probe result = probe_with(&failing);
  CHECK(strcmp(result.error, "ibv_alloc_pd: Input/output error (errno 5)") == 0, "%s", result.error);
  CHECK_EQUAL(result.queue_pairs, 0);
}

static void test_completion_queue_that_fails(void) {
  fail_from(0);
  failing.create_cq = create_cq;
  CHECK(strncmp(probe_with(&failing).error, "ibv_create_cq: ", 15) == 0);
}

/* Whichever call is the first to fail, nothing is left. */
static void test_queue_pairs_that_fail(void) {
  for (int call = 0; call < 40; call++) {
    fail_from(call);
    failing.create_qp = create_qp;
    mlxdist_probe result = probe_with(&failing);
    CHECK(!*result.error && result.kept == 0);
    CHECK(call > 1 || result.queue_pairs == 0);
    CHECK_EQUAL(result.regions, 100);
  }
}

static void test_regions_that_fail(void) {
  for (int call = 0; call < 130; call++) {
    fail_from(call);
    failing.reg_mr = reg_mr;
    mlxdist_probe result = probe_with(&failing);
    CHECK(!*result.error && result.kept == 0);
    CHECK_EQUAL(result.queue_pairs, 3);
    CHECK(result.regions <= call);
  }
}

static void test_access_flags_that_fail(void) {
  fail_from(1);
  failing.modify_qp = modify_qp;
  mlxdist_probe result = probe_with(&failing);
  CHECK(result.queue_pair_local && !result.queue_pair_remote);
}

/* Objects that the device does not take back are counted; here it does take them, and only says otherwise. */

static int destroy_qp(struct ibv_qp *qp) {
  bool refuses = fails();
  soft->destroy_qp(qp);
  return refuses ? EBUSY : 0;
}

static void test_objects_that_are_kept(void) {
  fail_from(1000);
  failing.destroy_qp = destroy_qp;
  probe_with(&failing);
  int destroyed = 1000 - left;
  fail_from(destroyed - 2);
  failing.destroy_qp = destroy_qp;
  CHECK_EQUAL(probe_with(&failing).kept, 2);
}

/* Where others hold queue pairs it finds the rest, and the reason. */
static void test_device_in_use(void) {
  const struct verbs *verbs = verbs_soft_profile("apple-tb5");
  struct ibv_context *other = open_first(verbs);
  struct ibv_pd *pd = verbs->alloc_pd(other);
  struct ibv_cq *cq = verbs->create_cq(other, 16, 0, 0, 0);
  struct ibv_qp_init_attr init = {.send_cq = cq,
                                  .recv_cq = cq,
                                  .cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
                                  .qp_type = IBV_QPT_UC};
  struct ibv_qp *qps[4];
  for (int i = 0; i < 4; i++) CHECK((qps[i] = verbs->create_qp(pd, &init)));
  pid_t probing = fork(); /* a process opens the device once */
  CHECK(probing >= 0);
  if (probing == 0) {
    mlxdist_probe result = probe_with(verbs);
    _exit(result.queue_pairs == 6 && result.queue_pair_errno == EBUSY ? 0 : 1);
  }
  CHECK_EQUAL(check_wait(probing), 0);
  for (int i = 0; i < 4; i++) CHECK_EQUAL(verbs->destroy_qp(qps[i]), 0);
  CHECK(verbs->destroy_cq(cq) == 0 && verbs->dealloc_pd(pd) == 0);
  CHECK_EQUAL(verbs->close_device(other), 0);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"Profiles", test_profiles},
      {"Calls", test_calls},
      {"DomainThatFails", test_domain_that_fails},
      {"CompletionQueueThatFails", test_completion_queue_that_fails},
      {"QueuePairsThatFail", test_queue_pairs_that_fail},
      {"RegionsThatFail", test_regions_that_fail},
      {"AccessFlagsThatFail", test_access_flags_that_fail},
      {"ObjectsThatAreKept", test_objects_that_are_kept},
      {"DeviceInUse", test_device_in_use},
  };
  host = (uint32_t)getpid();
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
