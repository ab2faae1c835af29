/* The profile apple-tb5-27: a SEND crosses in packets of one frame, each of which takes a receive. */
#define _POSIX_C_SOURCE 200809L
#include "../providers/soft/soft.h"
#include "check.h"
#include "soft_apple.h"
#include "tcp_pair.h"

#include <errno.h>

#define IN_PART IBV_WC_LOC_LEN_ERR

static struct side_options options_27(uint32_t host) {
  struct side_options options = options_of(host);
  options.profile = "apple-tb5-27";
  return options;
}

static void open_27(struct side *a, struct side *b, const uint8_t *key) {
  struct side_options options[2] = {options_27(0), options_27(1)};
  options[0].key = options[1].key = key;
  side_open(a, options[0]);
  side_open(b, options[1]);
  side_connect(a, b);
}

static void test_limits(void) {
  const struct verbs *verbs = verbs_soft();
  struct side side;
  struct ibv_device_attr device;
  struct ibv_port_attr port;
  struct ibv_qp *more[2];
  side_open(&side, options_27(0));
  CHECK_EQUAL(verbs->query_device(side.context, &device), 0);
  CHECK(device.max_qp == 3 && device.max_mr == 100 && device.max_mr_size == 0xfa0000);
  CHECK_EQUAL(verbs->query_port(side.context, 1, &port), 0);
  CHECK(port.link_layer == IBV_LINK_LAYER_THUNDERBOLT && port.max_msg_sz == FRAME);
  for (int i = 0; i < 2; i++) CHECK((more[i] = side_create_qp(&side, options_27(0))));
  CHECK(!side_create_qp(&side, options_27(0)) && errno == ENOMEM);
  for (int i = 0; i < 2; i++) CHECK_EQUAL(verbs->destroy_qp(more[i]), 0);
  side_close(&side);
}

static void test_registrations(void) {
  const struct verbs *verbs = verbs_soft();
  struct side side;
  side_open(&side, options_27(0));
  char *memory = verbs->alloc_memory(side.context, 0xfa0000 + 1);
  CHECK(memory);
  CHECK(!verbs->reg_mr(side.pd, memory, 0xfa0000 + 1, IBV_ACCESS_LOCAL_WRITE) && errno == EINVAL);
  CHECK(!verbs->reg_mr(side.pd, memory, FRAME, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ) && errno == EINVAL);
  CHECK(!verbs->reg_mr(side.pd, memory, FRAME, 0) && errno == EINVAL);
  struct ibv_mr *mr = verbs->reg_mr(side.pd, memory, 0xfa0000, IBV_ACCESS_LOCAL_WRITE);
  CHECK(mr);
  CHECK_EQUAL(verbs->dereg_mr(mr), 0);
  verbs->free_memory(side.context, memory, 0xfa0000 + 1);
  side_close(&side);
}

/* Index 0 is a UUID, by which no queue pair is connected. */
static void test_addresses(void) {
  const struct verbs *verbs = verbs_soft();
  struct side a, b;
  enum verbs_gid_type type;
  side_open(&a, options_27(0));
  side_open(&b, options_27(1));
  CHECK(a.gid_index == 1 && a.gid.raw[0] == 0xfe && a.gid.raw[1] == 0x80);
  CHECK_EQUAL(verbs->query_gid_type(a.context, 1, 0, &type), 0);
  CHECK_EQUAL(type, VERBS_GID_UNKNOWN);
  struct side_address peer = side_address(&b);
  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_INIT, peer), 0);
  peer.gid_index = 0;
  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_RTR, peer), EINVAL);
  peer.gid_index = 1;
  CHECK_EQUAL(verbs->query_gid(b.context, 1, 0, &peer.gid), 0);
  CHECK(side_modify(a.qp, IBV_QPS_RTR, peer) != 0);
  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_RTR, side_address(&b)), 0);
  side_close(&b);
  side_close(&a);
}

/* Three receives for 2.5 frames, and the queue pair goes on. */
static void check_packets(const uint8_t *key) {
  struct side a, b;
  open_27(&a, &b, key);
  for (unsigned round = 0; round < 2; round++) {
    side_fill(a.memory, 5 * FRAME / 2, round);
    for (uint64_t i = 0; i < 3; i++) CHECK_EQUAL(side_receive(&b, i, i * FRAME, FRAME), 0);
    CHECK_EQUAL(side_send(&a, 7, 0, 5 * FRAME / 2, IBV_SEND_SIGNALED), 0);
    for (uint64_t i = 0; i < 3; i++) {
      struct ibv_wc wc = tcp_poll_one(&b, &a, i, i < 2 ? IN_PART : IBV_WC_SUCCESS);
      CHECK(wc.opcode == IBV_WC_RECV && wc.wc_flags == 0);
      CHECK_EQUAL(wc.byte_len, i < 2 ? FRAME : FRAME / 2);
    }
    side_verify(b.memory, 5 * FRAME / 2, round);
    tcp_poll_one(&a, &b, 7, IBV_WC_SUCCESS);
    CHECK_EQUAL(side_state(b.qp), IBV_QPS_RTS);
  }
  side_close_pair(&a, &b);
}

static void test_packets(void) { check_packets(NULL); }
static void test_packets_by_tcp(void) { check_packets(tcp_key); }

/* In the middle of a message; the SEND completes when its last packet has left. */
static void test_a_packet_waits_for_a_receive(void) {
  struct side a, b;
  struct ibv_wc wc[2];
  open_27(&a, &b, NULL);
  side_fill(a.memory, 2 * FRAME, 1);
  CHECK_EQUAL(side_receive(&b, 0, 0, FRAME), 0);
  CHECK_EQUAL(side_send(&a, 7, 0, 2 * FRAME, IBV_SEND_SIGNALED), 0);
  CHECK_EQUAL(side_poll_one(&b, 0, IN_PART).byte_len, FRAME);
  CHECK_EQUAL(ibv_poll_cq(a.cq, 2, wc), 0);
  CHECK_EQUAL(side_receive(&b, 1, FRAME, FRAME), 0);
  side_poll_one(&a, 7, IBV_WC_SUCCESS);
  CHECK_EQUAL(side_poll_one(&b, 1, IBV_WC_SUCCESS).byte_len, FRAME);
  side_verify(b.memory, 2 * FRAME, 1);
  side_close_pair(&a, &b);
}

static void check_failing_receive(size_t sent, size_t received) {
  struct side a, b;
  open_27(&a, &b, NULL);
  CHECK_EQUAL(side_receive(&b, 0, 0, received), 0);
  CHECK_EQUAL(side_send(&a, 7, 0, sent, 0), 0);
  side_poll_one(&b, 0, IBV_WC_LOC_LEN_ERR);
  CHECK_EQUAL(side_state(b.qp), IBV_QPS_ERR);
  side_close_pair(&a, &b);
}

static void test_receives_that_fail(void) {
  check_failing_receive(1, FRAME + 1);
  check_failing_receive(2 * FRAME, 2 * FRAME);
  check_failing_receive(2, 1);
}

/* It neither arrives nor completes, and takes a place in the queue; what is posted after it is carried. */
static void test_an_empty_send_is_lost(void) {
  struct side a, b;
  struct ibv_wc wc[2];
  open_27(&a, &b, NULL);
  CHECK_EQUAL(side_receive(&b, 0, 0, FRAME), 0);
  CHECK_EQUAL(side_send(&a, 7, 0, 0, IBV_SEND_SIGNALED), 0);
  CHECK_EQUAL(ibv_poll_cq(a.cq, 2, wc), 0);
  CHECK_EQUAL(ibv_poll_cq(b.cq, 2, wc), 0);
  CHECK_EQUAL(side_send(&a, 8, 0, 5, IBV_SEND_SIGNALED), 0);
  side_poll_one(&a, 8, IBV_WC_SUCCESS);
  CHECK_EQUAL(side_poll_one(&b, 0, IBV_WC_SUCCESS).byte_len, 5);
  side_close_pair(&a, &b);
}

/* The send queue counts packets. */
static void test_packets_in_flight(void) {
  struct side a, b;
  struct side_options options[2] = {options_27(0), options_27(1)};
  options[0].max_send_wr = 4095;
  side_open(&a, options[0]);
  side_open(&b, options[1]);
  side_connect(&a, &b);
  const uint64_t whole = 4095 * FRAME / SIDE_BYTES, rest = 4095 * FRAME - whole * SIDE_BYTES;
  for (uint64_t i = 0; i < whole; i++) CHECK_EQUAL(side_send(&a, i, 0, SIDE_BYTES, 0), 0);
  CHECK_EQUAL(side_send(&a, whole, 0, rest + 1, 0), ENOMEM);
  CHECK_EQUAL(side_send(&a, whole, 0, rest, 0), 0);
  CHECK_EQUAL(side_send(&a, whole + 1, 0, 1, 0), ENOMEM);
  side_close_pair(&a, &b);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"Limits", test_limits},
      {"Registrations", test_registrations},
      {"Addresses", test_addresses},
      {"Packets", test_packets},
      {"PacketsByTcp", test_packets_by_tcp},
      {"APacketWaitsForAReceive", test_a_packet_waits_for_a_receive},
      {"ReceivesThatFail", test_receives_that_fail},
      {"AnEmptySendIsLost", test_an_empty_send_is_lost},
      {"PacketsInFlight", test_packets_in_flight},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
