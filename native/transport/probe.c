/*
 * The probe of a device: see probe.h.
 *
 * What query_device says is no limit to plan by: Apple's devices say 11 queue pairs and have 10. What takes a
 * connection to find out stays open: whether the receives that there is room for can be posted, which Apple's devices
 * refuse before RTS, how long a message may be, and how it arrives: peer_probe.c.
 */
#include "probe.h"

#include "device.h"
#include "pages.h"
#include "steady_clock.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define CQ_ENTRIES 16 /* no message is sent, so nothing completes */

struct probe {
  const struct verbs *verbs;
  struct ibv_context *context;
  struct ibv_pd *pd;
  struct ibv_cq *cq;
  void *memory;
  enum ibv_qp_type type; /* of the queue pairs that limits are looked for with */
  int access;            /* flags that a region takes */
  probe_call *call;
  mlxdist_probe *result;
};

static void call(const struct probe *probe, const char *name) { probe->call(name, probe->context->device->name); }

/* --- Objects that are given back at once; one that the device keeps is gone until the machine restarts */

static struct ibv_qp *create_qp(const struct probe *probe, enum ibv_qp_type type, uint32_t receives,
                                uint32_t inline_data) {
  struct ibv_qp_init_attr init = {
      .send_cq = probe->cq,
      .recv_cq = probe->cq,
      .cap = {.max_send_wr = 1,
              .max_recv_wr = receives,
              .max_send_sge = 1,
              .max_recv_sge = 1,
              .max_inline_data = inline_data},
      .qp_type = type,
  };
  call(probe, "ibv_create_qp");
  errno = 0;
  return probe->verbs->create_qp(probe->pd, &init);
}

static void destroy_qp(const struct probe *probe, struct ibv_qp *qp) {
  call(probe, "ibv_destroy_qp");
  if (probe->verbs->destroy_qp(qp) != 0) probe->result->kept++;
}

static bool creates(const struct probe *probe, enum ibv_qp_type type, uint32_t receives, uint32_t inline_data) {
  struct ibv_qp *qp = create_qp(probe, type, receives, inline_data);
  if (qp) destroy_qp(probe, qp);
  return qp;
}

static bool initializes(const struct probe *probe, int access) {
  struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = (unsigned)access};
  struct ibv_qp *qp = create_qp(probe, probe->type, 1, 0);
  if (!qp) return false;
  call(probe, "ibv_modify_qp");
  int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
  int error = probe->verbs->modify_qp(qp, &attr, mask);
  destroy_qp(probe, qp);
  return !error;
}

static struct ibv_mr *reg_mr(const struct probe *probe, uint64_t bytes, int access) {
  call(probe, "ibv_reg_mr");
  return probe->verbs->reg_mr(probe->pd, probe->memory, bytes, access);
}

static void dereg_mr(const struct probe *probe, struct ibv_mr *mr) {
  call(probe, "ibv_dereg_mr");
  if (probe->verbs->dereg_mr(mr) != 0) probe->result->kept++;
}

static bool registers(const struct probe *probe, uint64_t bytes, int access) {
  struct ibv_mr *mr = reg_mr(probe, bytes, access);
  if (mr) dereg_mr(probe, mr);
  return mr;
}

/* --- What is looked for */

static void probe_queue_pairs(struct probe *probe) {
  mlxdist_probe *result = probe->result;
  struct ibv_qp *made[MLXDIST_PROBE_QUEUE_PAIRS];
  result->uc = creates(probe, IBV_QPT_UC, 1, 0);
  result->rc = creates(probe, IBV_QPT_RC, 1, 0);
  probe->type = result->uc || !result->rc ? IBV_QPT_UC : IBV_QPT_RC;
  int32_t count = 0;
  while (count < MLXDIST_PROBE_QUEUE_PAIRS && (made[count] = create_qp(probe, probe->type, 1, 0))) count++;
  if (count < MLXDIST_PROBE_QUEUE_PAIRS) result->queue_pair_errno = errno;
  result->queue_pairs = count;
  while (count > 0) destroy_qp(probe, made[--count]);
}

/* Queues are 2^n - 1 deep on Apple's devices, and the transport needs no other depth. */
static void probe_capabilities(const struct probe *probe) {
  mlxdist_probe *result = probe->result;
  for (int32_t n = MLXDIST_PROBE_RECEIVES; n > 0 && !result->receives; n /= 2)
    if (creates(probe, probe->type, (uint32_t)n, 0)) result->receives = n;
  for (int32_t n = MLXDIST_PROBE_INLINE; n >= 16 && !result->inline_bytes; n /= 2)
    if (creates(probe, probe->type, 1, (uint32_t)n)) result->inline_bytes = n;
}

static void probe_access(struct probe *probe) {
  mlxdist_probe *result = probe->result;
  result->region_local = registers(probe, PAGES_UNIT, ACCESS_LOCAL);
  result->region_remote = registers(probe, PAGES_UNIT, ACCESS_REMOTE);
  result->queue_pair_local = initializes(probe, ACCESS_LOCAL);
  result->queue_pair_remote = initializes(probe, ACCESS_REMOTE);
  probe->access = result->region_local ? ACCESS_LOCAL : ACCESS_REMOTE;
}

/* The largest one, by bisection. The device locks its pages in memory, untouched ones too: hence no more is tried. */
static void probe_region_bytes(const struct probe *probe) {
  uint64_t taken = 0, refused = MLXDIST_PROBE_REGION_BYTES / PAGES_UNIT + 1;
  for (uint64_t pages = refused - 1; taken + 1 < refused; pages = (taken + refused) / 2) {
    if (registers(probe, pages * PAGES_UNIT, probe->access))
      taken = pages;
    else
      refused = pages;
  }
  probe->result->region_bytes = taken * PAGES_UNIT;
}

static void probe_regions(const struct probe *probe) {
  struct ibv_mr *made[MLXDIST_PROBE_REGIONS];
  int32_t count = 0;
  while (count < MLXDIST_PROBE_REGIONS && (made[count] = reg_mr(probe, PAGES_UNIT, probe->access))) count++;
  probe->result->regions = count;
  while (count > 0) dereg_mr(probe, made[--count]);
}

/* --- All of it */

static bool fail_call(const struct probe *probe, const char *name) {
  int error = errno ? errno : EIO;
  snprintf(probe->result->error, sizeof probe->result->error, "%s: %s (errno %d)", name, strerror(error), error);
  return false;
}

static bool begin(struct probe *probe) {
  probe->memory = pages_alloc(MLXDIST_PROBE_REGION_BYTES);
  if (!probe->memory) return fail_call(probe, "mmap");
  call(probe, "ibv_alloc_pd");
  probe->pd = probe->verbs->alloc_pd(probe->context);
  if (!probe->pd) return fail_call(probe, "ibv_alloc_pd");
  call(probe, "ibv_create_cq");
  probe->cq = probe->verbs->create_cq(probe->context, CQ_ENTRIES, 0, 0, 0);
  return probe->cq || fail_call(probe, "ibv_create_cq");
}

static void end(const struct probe *probe) {
  if (probe->cq) call(probe, "ibv_destroy_cq");
  if (probe->cq && probe->verbs->destroy_cq(probe->cq) != 0) probe->result->kept++;
  if (probe->pd) call(probe, "ibv_dealloc_pd");
  if (probe->pd && probe->verbs->dealloc_pd(probe->pd) != 0) probe->result->kept++;
  pages_free(probe->memory, MLXDIST_PROBE_REGION_BYTES);
}

void probe_device(const struct verbs *verbs, struct ibv_context *context, probe_call *call, mlxdist_probe *result) {
  *result = (mlxdist_probe){0};
  struct probe probe = {.verbs = verbs, .context = context, .call = call, .result = result};
  uint64_t begun = clock_ns();
  if (begin(&probe)) {
    probe_queue_pairs(&probe);
    probe_capabilities(&probe);
    probe_access(&probe);
    probe_region_bytes(&probe);
    probe_regions(&probe);
  }
  end(&probe);
  result->microseconds = (uint32_t)((clock_ns() - begun) / 1000);
}
