/* The profile rxe: where soft-RoCE differs from the ideal device. */
#include "check.h"
#include "soft_side.h"

#include <errno.h>

static const struct side_options options = {.cqe = 64, .max_send_wr = 8, .max_recv_wr = 8, .profile = "rxe"};

static void test_device(void) {
  struct side side;
  struct ibv_device_attr device;
  struct ibv_port_attr port;
  side_open(&side, options);
  CHECK_EQUAL(verbs_soft()->query_device(side.context, &device), 0);
  CHECK_EQUAL(device.max_cqe, 32768);
  CHECK(device.max_sge >= 2 && device.max_qp >= 64 && device.max_mr >= 1024);
  CHECK_EQUAL(verbs_soft()->query_port(side.context, 1, &port), 0);
  CHECK(port.active_mtu == IBV_MTU_1024 && port.max_mtu == IBV_MTU_4096);
  CHECK_EQUAL(port.max_msg_sz, 8 << 20);
  CHECK(!verbs_soft()->create_cq(side.context, 32769, NULL, NULL, 0) && errno == EINVAL);
  CHECK_EQUAL(port.link_layer, IBV_LINK_LAYER_ETHERNET);
  CHECK(!verbs_soft_profile("rxe")->registers_freely);
  side_close(&side);
}

static int send_bytes(struct side *side, uint32_t bytes) {
  struct ibv_sge sge = {(uintptr_t)side->memory, bytes, side->mr->lkey};
  struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM}, *bad;
  return ibv_post_send(side->qp, &wr, &bad);
}

/* A SEND that is too long for the receive vanishes like one that meets none; the receive waits for the next. */
static void test_dropped(void) {
  struct side a, b;
  side_open_pair(&a, &b, options);
  CHECK_EQUAL(side_send(&a, 1, 0, 64, IBV_SEND_SIGNALED), 0);
  side_poll_one(&a, 1, IBV_WC_SUCCESS);
  memset(b.memory, 0x22, 128);
  CHECK_EQUAL(side_receive(&b, 2, 0, 64), 0);
  CHECK_EQUAL(side_send(&a, 3, 0, 65, IBV_SEND_SIGNALED), 0);
  side_poll_one(&a, 3, IBV_WC_SUCCESS);
  struct ibv_wc wc;
  CHECK_EQUAL(ibv_poll_cq(b.cq, 1, &wc), 0);
  for (int i = 0; i < 128; i++) CHECK_EQUAL(b.memory[i], 0x22);
  CHECK_EQUAL(side_counters(&a).dropped, 2);
  CHECK_EQUAL(side_state(b.qp), IBV_QPS_RTS);
  CHECK_EQUAL(send_bytes(&a, 64), 0);
  CHECK_EQUAL(side_poll_one(&b, 2, IBV_WC_SUCCESS).byte_len, 64);
  CHECK_EQUAL(send_bytes(&a, (8 << 20) + 1), EINVAL);
  side_close_pair(&a, &b);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {{"Device", test_device}, {"Dropped", test_dropped}};
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
