/* The software provider's objects: device, memory, queue pairs and their states, reference counts. */
#include "../providers/soft/soft.h"
#include "check.h"
#include "soft_side.h"

#include <errno.h>

static const struct side_address no_peer = {.qp_num = 1};

static void test_device(void) {
  const struct verbs *verbs = verbs_soft();
  int count = 0;
  struct ibv_device **list = verbs->get_device_list(&count);
  CHECK_EQUAL(count, 4);
  for (int i = 0; i < 4; i++) {
    const char name[] = {'s', 'o', 'f', 't', (char)('0' + i), '\0'};
    CHECK(strcmp(verbs->get_device_name(list[i]), name) == 0);
  }
  CHECK(!list[4]);
  verbs->free_device_list(list);

  struct ibv_context *context = side_open_device();
  struct ibv_device_attr device;
  struct ibv_port_attr port;
  union ibv_gid gid;
  CHECK_EQUAL(verbs->query_device(context, &device), 0);
  CHECK_EQUAL(device.max_qp, SOFT_MAX_QP);
  CHECK_EQUAL(device.phys_port_cnt, 1);
  CHECK_EQUAL(verbs->query_port(context, 1, &port), 0);
  CHECK_EQUAL(port.state, IBV_PORT_ACTIVE);
  CHECK(port.gid_tbl_len >= 1);
  CHECK_EQUAL(port.lid, 0); /* no key, no listener */
  CHECK_EQUAL(verbs->query_port(context, 0, &port), EINVAL);
  CHECK_EQUAL(verbs->query_port(context, 2, &port), EINVAL);
  CHECK_EQUAL(verbs->query_gid(context, 1, 0, &gid), 0);
  CHECK_EQUAL(verbs->query_gid(context, 1, port.gid_tbl_len, &gid), -1);
  CHECK_EQUAL(verbs->query_gid(context, 2, 0, &gid), -1);
  CHECK_EQUAL(verbs->close_device(context), 0);
}

static void test_alloc_memory(void) {
  const struct verbs *verbs = verbs_soft();
  struct ibv_context *context = side_open_device();
  size_t page = SEGMENT_PAGE;
  size_t sizes[] = {1, page, page + 1, 4 * page, 1 << 20};
  char *memory[5];
  for (int i = 0; i < 5; i++) {
    memory[i] = verbs->alloc_memory(context, sizes[i]);
    CHECK(memory[i]);
    CHECK_EQUAL((uintptr_t)memory[i] % page, 0);
    for (size_t b = 0; b < sizes[i]; b++) CHECK_EQUAL(memory[i][b], 0);
    memset(memory[i], 0xa5, sizes[i]);
  }
  for (int i = 0; i < 5; i++)
    for (size_t b = 0; b < sizes[i]; b++) CHECK_EQUAL((unsigned char)memory[i][b], 0xa5);

  /* Freed memory comes back, zeroed, and neighbours merge whatever the order. */
  static const int order[] = {1, 3, 2, 0, 4};
  for (int i = 0; i < 5; i++) verbs->free_memory(context, memory[order[i]], sizes[order[i]]);
  size_t whole = SEGMENT_BYTES - ARENA_OFFSET;
  char *all = verbs->alloc_memory(context, whole);
  CHECK(all == memory[0], "%p, expected %p", (void *)all, (void *)memory[0]);
  for (size_t b = 0; b < 2 << 20; b++) CHECK_EQUAL(all[b], 0);
  CHECK(!verbs->alloc_memory(context, 1) && errno == ENOMEM);
  verbs->free_memory(context, all, whole);
  CHECK(!verbs->alloc_memory(context, 0) && errno == EINVAL);
  CHECK(!verbs->alloc_memory(context, SIZE_MAX) && errno == ENOMEM);

  /* What was never allocated is not freed. */
  char *kept = verbs->alloc_memory(context, 2 * page);
  kept[0] = kept[page] = 1;
  verbs->free_memory(context, kept, page);
  CHECK_EQUAL(errno, EINVAL);
  errno = 0;
  verbs->free_memory(context, kept + page, page);
  CHECK_EQUAL(errno, EINVAL);
  CHECK(kept[0] == 1 && kept[page] == 1);
  CHECK_EQUAL(verbs->close_device(context), 0);
}

/* Transitions that verbs allow; every state also goes to RESET and ERR. */
static int allowed(enum ibv_qp_state from, enum ibv_qp_state to) {
  if (to == IBV_QPS_RESET || to == IBV_QPS_ERR) return 1;
  if (from == IBV_QPS_RESET || from == IBV_QPS_INIT) return to == (from == IBV_QPS_RESET ? IBV_QPS_INIT : IBV_QPS_RTR);
  return from == IBV_QPS_RTR && to == IBV_QPS_RTS;
}

static void bring_to(struct ibv_qp *qp, enum ibv_qp_state state, struct side_address peer) {
  CHECK_EQUAL(side_modify(qp, IBV_QPS_RESET, peer), 0);
  if (state == IBV_QPS_ERR) {
    CHECK_EQUAL(side_modify(qp, IBV_QPS_ERR, peer), 0);
    return;
  }
  for (enum ibv_qp_state s = IBV_QPS_INIT; s <= state; s++) CHECK_EQUAL(side_modify(qp, s, peer), 0);
}

static void test_qp_state_transitions(void) {
  static const enum ibv_qp_state states[] = {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS,
                                             IBV_QPS_SQD,   IBV_QPS_SQE,  IBV_QPS_ERR};
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  struct side_address self = side_address(&side);
  for (int f = 0; f < 7; f++) {
    if (states[f] == IBV_QPS_SQD || states[f] == IBV_QPS_SQE) continue; /* never entered */
    for (int t = 0; t < 7; t++) {
      bring_to(side.qp, states[f], self);
      struct ibv_qp_attr attr = side_attr(states[t], self);
      /* INIT and RTS may be modified in place, with fewer attributes. */
      int in_place = f == t && (states[f] == IBV_QPS_INIT || states[f] == IBV_QPS_RTS);
      int mask = in_place ? IBV_QP_STATE | IBV_QP_ACCESS_FLAGS : side_mask(states[t]);
      int ok = in_place || allowed(states[f], states[t]);
      CHECK(verbs_soft()->modify_qp(side.qp, &attr, mask) == (ok ? 0 : EINVAL), "%d to %d", states[f], states[t]);
      CHECK_EQUAL(side_state(side.qp), ok ? states[t] : states[f]);
    }
  }
  side_close(&side);
}

static void test_qp_masks(void) {
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  struct side_address self = side_address(&side);
  for (enum ibv_qp_state to = IBV_QPS_INIT; to <= IBV_QPS_RTS; to++) {
    bring_to(side.qp, to - 1, self);
    struct ibv_qp_attr attr = side_attr(to, self);
    for (int bit = 0; bit < 26; bit++) {
      int flag = 1 << bit;
      if (flag == IBV_QP_STATE || flag == IBV_QP_CUR_STATE) continue;
      int required = side_mask(to) & flag;
      int optional = flag == IBV_QP_ACCESS_FLAGS || (to == IBV_QPS_RTR && flag == IBV_QP_PKEY_INDEX);
      if (optional && !required) continue;
      int error = verbs_soft()->modify_qp(side.qp, &attr, side_mask(to) ^ flag);
      CHECK(error == EINVAL, "to %d with bit %d %s: %d", to, bit, required ? "missing" : "added", error);
      CHECK_EQUAL(side_state(side.qp), to - 1);
    }
    attr.cur_qp_state = IBV_QPS_ERR;
    CHECK_EQUAL(verbs_soft()->modify_qp(side.qp, &attr, side_mask(to) | IBV_QP_CUR_STATE), EINVAL);
    attr.cur_qp_state = to - 1;
    CHECK_EQUAL(verbs_soft()->modify_qp(side.qp, &attr, side_mask(to) | IBV_QP_CUR_STATE), 0);
  }
  side_close(&side);
}

static void check_refused(struct ibv_qp *qp, struct ibv_qp_attr attr) {
  CHECK_EQUAL(verbs_soft()->modify_qp(qp, &attr, side_mask(attr.qp_state)), EINVAL);
}

static void test_qp_values(void) {
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  struct side_address self = side_address(&side);
  struct ibv_qp_attr init = side_attr(IBV_QPS_INIT, self), attr = init;
  attr.port_num = 2, check_refused(side.qp, attr), attr = init;
  attr.pkey_index = 1, check_refused(side.qp, attr), attr = init;
  attr.qp_access_flags = 1 << 10, check_refused(side.qp, attr);
  CHECK_EQUAL(side_modify(side.qp, IBV_QPS_INIT, self), 0);

  struct ibv_qp_attr rtr = side_attr(IBV_QPS_RTR, self);
  attr = rtr, attr.ah_attr.is_global = 0, check_refused(side.qp, attr);
  attr = rtr, attr.ah_attr.port_num = 2, check_refused(side.qp, attr);
  attr = rtr, attr.ah_attr.grh.sgid_index = 1, check_refused(side.qp, attr);
  attr = rtr, attr.path_mtu = 0, check_refused(side.qp, attr);
  attr = rtr, attr.path_mtu = 6, check_refused(side.qp, attr);
  attr = rtr, attr.dest_qp_num = 1 << 24, check_refused(side.qp, attr);
  CHECK_EQUAL(side_modify(side.qp, IBV_QPS_RTR, self), 0);
  side_close(&side);
}

/* A peer that is not there is an error of modify_qp, and the queue pair can be connected to another. */
static void test_wrong_peer(void) {
  struct side side, other;
  side_open(&side, SIDE_DEFAULTS);
  side_open(&other, SIDE_DEFAULTS);
  CHECK_EQUAL(side_modify(side.qp, IBV_QPS_INIT, no_peer), 0);

  CHECK(side_modify(side.qp, IBV_QPS_RTR, no_peer) != 0);
  struct side_address wrong = side_address(&other);
  for (int byte = 0; byte < 16; byte++) {
    wrong.gid.raw[byte] ^= 0x55;
    int error = side_modify(side.qp, IBV_QPS_RTR, wrong);
    CHECK(error == EINVAL || error == ENOENT || error == EACCES || error == ESRCH, "byte %d: %d", byte, error);
    wrong.gid.raw[byte] ^= 0x55;
  }
  struct side_address gone = side_address(&other);
  side_close(&other);
  int error = side_modify(side.qp, IBV_QPS_RTR, gone);
  CHECK(error == EINVAL || error == ENOENT, "closed: %d", error);
  CHECK_EQUAL(side_state(side.qp), IBV_QPS_INIT);
  CHECK_EQUAL(side_modify(side.qp, IBV_QPS_RTR, side_address(&side)), 0);
  side_close(&side);
}

static void test_create_qp_refusals(void) {
  const struct verbs *verbs = verbs_soft();
  struct side side, other;
  side_open(&side, SIDE_DEFAULTS);
  side_open(&other, SIDE_DEFAULTS);
  const struct ibv_qp_init_attr good = {
      .send_cq = side.cq, .recv_cq = side.cq, .cap = {1, 1, 1, 1, 0}, .qp_type = IBV_QPT_UC};
  struct ibv_qp_init_attr attr = good;
  attr.qp_type = IBV_QPT_RC;
  CHECK(!verbs->create_qp(side.pd, &attr) && errno == EOPNOTSUPP);
  attr.qp_type = IBV_QPT_UD;
  CHECK(!verbs->create_qp(side.pd, &attr) && errno == EOPNOTSUPP);
  attr = good, attr.recv_cq = NULL;
  CHECK(!verbs->create_qp(side.pd, &attr) && errno == EINVAL);
  attr = good, attr.send_cq = other.cq;
  CHECK(!verbs->create_qp(side.pd, &attr) && errno == EINVAL);
  attr = good, attr.cap.max_send_wr = SOFT_MAX_WR + 1;
  CHECK(!verbs->create_qp(side.pd, &attr) && errno == EINVAL);
  attr = good, attr.cap.max_recv_wr = SOFT_MAX_WR + 1;
  CHECK(!verbs->create_qp(side.pd, &attr) && errno == EINVAL);
  attr = good, attr.cap.max_recv_wr = UINT32_MAX;
  CHECK(!verbs->create_qp(side.pd, &attr) && errno == EINVAL);
  attr = good, attr.cap.max_send_sge = 5;
  CHECK(!verbs->create_qp(side.pd, &attr) && errno == EINVAL);
  attr = good, attr.cap.max_recv_sge = 2;
  CHECK(!verbs->create_qp(side.pd, &attr) && errno == EINVAL);
  attr = good, attr.cap.max_inline_data = 1;
  CHECK(!verbs->create_qp(side.pd, &attr) && errno == EINVAL);

  struct ibv_qp *qps[SOFT_MAX_QP - 1];
  for (int i = 0; i < SOFT_MAX_QP - 1; i++) {
    attr = good;
    qps[i] = verbs->create_qp(side.pd, &attr);
    CHECK(qps[i]);
    for (int j = 0; j < i; j++) CHECK(qps[i]->qp_num != qps[j]->qp_num);
  }
  CHECK(!verbs->create_qp(side.pd, &attr) && errno == ENOMEM);
  uint32_t last = qps[0]->qp_num;
  CHECK_EQUAL(verbs->destroy_qp(qps[0]), 0);
  qps[0] = verbs->create_qp(side.pd, &attr);
  CHECK(qps[0] && qps[0]->qp_num != last, "a number is not used again at once");
  for (int i = 0; i < SOFT_MAX_QP - 1; i++) CHECK_EQUAL(verbs->destroy_qp(qps[i]), 0);
  side_close(&other);
  side_close(&side);
}

static void test_create_cq_refusals(void) {
  const struct verbs *verbs = verbs_soft();
  struct ibv_context *context = side_open_device();
  CHECK(!verbs->create_cq(context, 0, NULL, NULL, 0) && errno == EINVAL);
  CHECK(!verbs->create_cq(context, SOFT_MAX_CQE + 1, NULL, NULL, 0) && errno == EINVAL);
  CHECK(!verbs->create_cq(context, 1, NULL, NULL, 1) && errno == EINVAL);
  CHECK(!verbs->create_cq(context, 1, NULL, (struct ibv_comp_channel *)context, 0) && errno == EOPNOTSUPP);
  CHECK_EQUAL(verbs->close_device(context), 0);
}

static void test_reference_counts(void) {
  const struct verbs *verbs = verbs_soft();
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  CHECK_EQUAL(side_modify(side.qp, IBV_QPS_INIT, no_peer), 0);
  CHECK_EQUAL(side_receive(&side, 1, 0, 64), 0);

  CHECK_EQUAL(verbs->close_device(side.context), EBUSY);
  CHECK_EQUAL(verbs->dealloc_pd(side.pd), EBUSY);
  CHECK_EQUAL(verbs->destroy_cq(side.cq), EBUSY);
  CHECK_EQUAL(verbs->dereg_mr(side.mr), EBUSY);
  CHECK_EQUAL(verbs->destroy_qp(side.qp), 0);
  CHECK_EQUAL(verbs->dealloc_pd(side.pd), EBUSY);
  CHECK_EQUAL(verbs->dereg_mr(side.mr), 0);
  CHECK_EQUAL(verbs->dealloc_pd(side.pd), 0);
  CHECK_EQUAL(verbs->close_device(side.context), EBUSY);
  CHECK_EQUAL(verbs->destroy_cq(side.cq), 0);
  CHECK_EQUAL(verbs->close_device(side.context), 0);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"Device", test_device},
      {"AllocMemory", test_alloc_memory},
      {"QpStateTransitions", test_qp_state_transitions},
      {"QpMasks", test_qp_masks},
      {"QpValues", test_qp_values},
      {"WrongPeer", test_wrong_peer},
      {"CreateQpRefusals", test_create_qp_refusals},
      {"CreateCqRefusals", test_create_cq_refusals},
      {"ReferenceCounts", test_reference_counts},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
