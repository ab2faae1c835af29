/* Messages between hosts, over the loopback interface: what arrives, what is dropped, what breaks and what does not. */
#define _GNU_SOURCE 1
#include "tcp_pair.h"

#include "../providers/soft/sockets.h"
#include "../providers/soft/tcp_receive.h"

#include <arpa/inet.h>
#include <errno.h>

static void test_addresses(void) {
  const struct verbs *verbs = verbs_soft();
  struct ibv_context *context = side_open_device();
  struct ibv_port_attr port;
  enum verbs_gid_type type;
  union ibv_gid gid;
  CHECK_EQUAL(verbs->query_port(context, 1, &port), 0);
  CHECK(port.gid_tbl_len >= 2, "these tests need the loopback interface");
  bool behind_loopback = false;
  for (int i = 0; i < port.gid_tbl_len; i++) {
    struct in_addr address;
    CHECK_EQUAL(verbs->query_gid(context, 1, i, &gid), 0);
    CHECK_EQUAL(verbs->query_gid_type(context, 1, i, &type), 0);
    CHECK_EQUAL(type, i ? VERBS_GID_TCP : VERBS_GID_MEMORY);
    CHECK_EQUAL(soft_address_from_gid(&gid, &address), i > 0);
    bool loopback = gid.raw[12] == 127;
    CHECK(i == 0 || loopback || !behind_loopback, "entry %d leads elsewhere, and one before it back", i);
    behind_loopback |= i && loopback;
  }
  CHECK_EQUAL(verbs->query_gid(context, 1, port.gid_tbl_len, &gid), -1);
  CHECK_EQUAL(verbs->query_gid(context, 1, -1, &gid), -1);
  CHECK_EQUAL(verbs->query_gid_type(context, 1, port.gid_tbl_len, &type), EINVAL);
  CHECK_EQUAL(port.lid, 0);
  CHECK_EQUAL(verbs->set_key(context, tcp_key), 0);
  CHECK_EQUAL(verbs->set_key(context, tcp_key), EBUSY);
  CHECK_EQUAL(verbs->query_port(context, 1, &port), 0);
  CHECK(port.lid != 0);
  CHECK_EQUAL(verbs->close_device(context), 0);
}

/* Why there is no connection; nothing once there is one. */
static void test_connect_error(void) {
  struct side side, other;
  side_open(&side, TCP_DEFAULTS);
  side_open(&other, TCP_DEFAULTS);
  CHECK_EQUAL(verbs_soft()->connect_error(side.qp), 0);
  struct side_address nowhere = side_address(&other);
  in_port_t closed;
  socket_close(socket_listen(&closed));
  nowhere.lid = ntohs(closed);
  for (enum ibv_qp_state state = IBV_QPS_INIT; state <= IBV_QPS_RTS; state++)
    CHECK_EQUAL(side_modify(side.qp, state, nowhere), 0);
  TCP_UNTIL(&side, &other, verbs_soft()->connect_error(side.qp) == ECONNREFUSED);
  tcp_reconnect(&side, &other, 7);
  tcp_settle(&side, &other);
  CHECK_EQUAL(verbs_soft()->connect_error(side.qp), 0);
  side_close(&side);
  side_close(&other);
}

/* What RTR refuses: no key, a table entry that is none, an address that is none, no port. */
static void test_rejected_address(void) {
  struct side side, keyless;
  side_open(&side, TCP_DEFAULTS);
  side_open(&keyless, SIDE_DEFAULTS);
  struct side_address peer = side_address(&side);
  CHECK_EQUAL(side_modify(keyless.qp, IBV_QPS_INIT, peer), 0);
  CHECK_EQUAL(side_modify(keyless.qp, IBV_QPS_RTR, peer), EINVAL);
  CHECK_EQUAL(verbs_soft()->set_key(keyless.context, tcp_key), EBUSY); /* it has a queue pair */
  CHECK_EQUAL(side_modify(side.qp, IBV_QPS_INIT, peer), 0);
  struct side_address wrong[3] = {peer, peer, peer};
  wrong[0].gid_index++;
  wrong[1].lid = 0;
  wrong[2].gid.raw[11] = 0;
  for (int i = 0; i < 3; i++) {
    if (i == 0 && peer.gid_index < soft_context(side.context)->addresses.count) continue;
    CHECK_EQUAL(side_modify(side.qp, IBV_QPS_RTR, wrong[i]), EINVAL);
    CHECK_EQUAL(side_state(side.qp), IBV_QPS_INIT);
  }
  CHECK_EQUAL(side_modify(side.qp, IBV_QPS_RTR, peer), 0);
  side_close(&side);
  side_close(&keyless);
}

/* Sends `length` bytes and checks every byte, and that none beyond them was touched. */
static void check_message(struct side *from, struct side *to, size_t length, unsigned seed) {
  const size_t target = SIDE_BYTES / 2 + 64;
  memset(to->memory + target - 64, 0x11, length + 128);
  side_fill(from->memory, length, seed);
  CHECK_EQUAL(side_receive(to, 100 + seed, target, length + 32), 0);
  CHECK_EQUAL(side_send(from, 200 + seed, 0, length, IBV_SEND_SIGNALED), 0);
  tcp_poll_one(from, to, 200 + seed, IBV_WC_SUCCESS);
  struct ibv_wc wc = tcp_poll_one(to, from, 100 + seed, IBV_WC_SUCCESS);
  CHECK_EQUAL(wc.opcode, IBV_WC_RECV);
  CHECK_EQUAL(wc.byte_len, length);
  CHECK_EQUAL(wc.wc_flags, 0);
  side_verify(to->memory + target, length, seed);
  for (size_t i = 0; i < 64; i++) CHECK_EQUAL(to->memory[target - 64 + i], 0x11);
  for (size_t i = 0; i < 64; i++) CHECK_EQUAL(to->memory[target + length + i], 0x11);
}

static void test_sizes(void) {
  static const size_t sizes[] = {0, 1, 11, 12, 13, 4096, 8179, 8180, 8181, 8192, 8193, 16384, 131072, 400001};
  struct side a, b;
  tcp_open_pair(&a, &b, TCP_DEFAULTS);
  uint64_t bytes = 0;
  for (unsigned round = 0; round < 4; round++)
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
      check_message(&a, &b, sizes[i], round);
      check_message(&b, &a, sizes[i], round + 1);
      bytes += sizes[i];
    }
  CHECK_EQUAL(side_counters(&a).bytes_sent, bytes);
  CHECK_EQUAL(side_counters(&a).dropped, 0);
  side_close_pair(&a, &b);
}

/* A queue pair that is connected to itself, through its own listener. */
static void test_loopback(void) {
  struct side side;
  side_open(&side, TCP_DEFAULTS);
  side_to_rts(side.qp, side_address(&side));
  for (unsigned n = 0; n < 5; n++) {
    CHECK_EQUAL(side_receive(&side, n, 4096, 4096), 0);
    CHECK_EQUAL(side_send(&side, n, 0, 1000 + n, 0), 0);
    CHECK_EQUAL(tcp_poll_one(&side, &side, n, IBV_WC_SUCCESS).byte_len, 1000 + n);
  }
  side_close(&side);
}

/* From four places, with immediate data. */
static void test_gather(void) {
  struct side a, b;
  tcp_open_pair(&a, &b, TCP_DEFAULTS);
  side_fill(a.memory, 1000, 5);
  struct ibv_sge list[4] = {{.length = 1}, {.length = 0}, {.length = 700}, {.length = 299}};
  uint64_t addr = (uintptr_t)a.memory;
  for (int i = 0; i < 4; addr += list[i++].length) list[i].addr = addr, list[i].lkey = a.mr->lkey;
  struct ibv_send_wr wr = {.sg_list = list, .num_sge = 4, .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = 0x12345678}, *bad;
  CHECK_EQUAL(side_receive(&b, 1, 0, 1000), 0);
  CHECK_EQUAL(ibv_post_send(a.qp, &wr, &bad), 0);
  struct ibv_wc wc = tcp_poll_one(&b, &a, 1, IBV_WC_SUCCESS);
  CHECK_EQUAL(wc.byte_len, 1000);
  CHECK_EQUAL(wc.wc_flags, IBV_WC_WITH_IMM);
  CHECK_EQUAL(wc.imm_data, 0x12345678);
  side_verify(b.memory, 1000, 5);
  side_close_pair(&a, &b);
}

#define LARGE ((size_t)100 << 20) /* more than the buffers of both systems hold */

/* A SEND that is larger than all buffers completes only when the peer reads; the one behind it comes after it. */
static void test_larger_than_the_system_takes(void) {
  struct side a, b;
  tcp_open_pair(&a, &b, TCP_DEFAULTS);
  struct side *sides[] = {&a, &b};
  struct ibv_sge sges[2];
  for (int i = 0; i < 2; i++) {
    char *memory = verbs_soft()->alloc_memory(sides[i]->context, LARGE);
    CHECK(memory);
    struct ibv_mr *mr = verbs_soft()->reg_mr(sides[i]->pd, memory, LARGE, IBV_ACCESS_LOCAL_WRITE);
    CHECK(mr);
    sges[i] = (struct ibv_sge){(uintptr_t)memory, (uint32_t)LARGE, mr->lkey};
  }
  side_fill((char *)(uintptr_t)sges[0].addr, LARGE, 3);
  struct ibv_recv_wr receive = {.wr_id = 1, .sg_list = &sges[1], .num_sge = 1}, *bad_receive;
  CHECK_EQUAL(ibv_post_recv(b.qp, &receive, &bad_receive), 0);
  CHECK_EQUAL(side_receive(&b, 2, 0, 8), 0);
  struct ibv_send_wr send = {.wr_id = 3,
                             .sg_list = &sges[0],
                             .num_sge = 1,
                             .opcode = IBV_WR_SEND,
                             .send_flags = IBV_SEND_SIGNALED},
                     *bad;
  CHECK_EQUAL(ibv_post_send(a.qp, &send, &bad), 0);
  CHECK_EQUAL(side_send(&a, 4, 0, 8, IBV_SEND_SIGNALED), 0);
  struct ibv_wc wc;
  for (int i = 0; i < 1000; i++) CHECK_EQUAL(ibv_poll_cq(a.cq, 1, &wc), 0); /* b does not read */
  CHECK_EQUAL(tcp_poll_one(&b, &a, 1, IBV_WC_SUCCESS).byte_len, LARGE);
  tcp_poll_one(&b, &a, 2, IBV_WC_SUCCESS);
  tcp_poll_one(&a, &b, 3, IBV_WC_SUCCESS);
  tcp_poll_one(&a, &b, 4, IBV_WC_SUCCESS);
  CHECK(memcmp((void *)(uintptr_t)sges[0].addr, (void *)(uintptr_t)sges[1].addr, LARGE) == 0);
  for (int i = 0; i < 2; i++) {
    const struct soft_mr *mr = soft_context(sides[i]->context)->mrs[1];
    CHECK_EQUAL(verbs_soft()->dereg_mr((struct ibv_mr *)(uintptr_t)&mr->verbs), 0);
    verbs_soft()->free_memory(sides[i]->context, (void *)(uintptr_t)sges[i].addr, LARGE);
  }
  side_close_pair(&a, &b);
}

/* The receiver drops and counts it. It does not come back for the receive that is posted then. */
static void test_no_receive(void) {
  struct side a, b;
  tcp_open_pair(&a, &b, TCP_DEFAULTS);
  side_fill(a.memory, 100000, 1);
  CHECK_EQUAL(side_send(&a, 1, 0, 100000, IBV_SEND_SIGNALED), 0);
  TCP_UNTIL(&b, &b, side_counters(&b).dropped == 1);
  tcp_poll_one(&a, &b, 1, IBV_WC_SUCCESS);
  side_fill(a.memory, 64, 2);
  CHECK_EQUAL(side_receive(&b, 2, 0, 64), 0);
  CHECK_EQUAL(side_send(&a, 3, 0, 64, 0), 0);
  tcp_poll_one(&b, &a, 2, IBV_WC_SUCCESS);
  side_verify(b.memory, 64, 2);
  CHECK_EQUAL(side_state(b.qp), IBV_QPS_RTS);
  side_close_pair(&a, &b);
}

static void test_too_long(void) {
  struct side a, b;
  tcp_open_pair(&a, &b, TCP_DEFAULTS);
  memset(b.memory, 0x22, 128);
  CHECK_EQUAL(side_receive(&b, 1, 0, 64), 0);
  CHECK_EQUAL(side_receive(&b, 2, 64, 64), 0);
  CHECK_EQUAL(side_send(&a, 3, 0, 65, 0), 0);
  CHECK_EQUAL(side_send(&a, 4, 0, 64, 0), 0);
  tcp_poll_one(&b, &a, 1, IBV_WC_LOC_LEN_ERR);
  tcp_poll_one(&b, &a, 2, IBV_WC_WR_FLUSH_ERR);
  CHECK_EQUAL(side_state(b.qp), IBV_QPS_ERR);
  CHECK_EQUAL(side_state(a.qp), IBV_QPS_RTS);
  for (int i = 0; i < 128; i++) CHECK_EQUAL(b.memory[i], 0x22);
  tcp_reconnect(&a, &b, 77);
  tcp_settle(&a, &b);
  check_message(&a, &b, 64, 1);
  side_close_pair(&a, &b);
}

static void test_bad_key_of_the_receive(void) {
  struct side a, b;
  tcp_open_pair(&a, &b, TCP_DEFAULTS);
  struct ibv_sge sge = {(uintptr_t)b.memory, 64, b.mr->lkey + 1};
  struct ibv_recv_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1}, *bad;
  CHECK_EQUAL(ibv_post_recv(b.qp, &wr, &bad), 0);
  CHECK_EQUAL(side_send(&a, 2, 0, 8, 0), 0);
  tcp_poll_one(&b, &a, 1, IBV_WC_LOC_PROT_ERR);
  CHECK_EQUAL(side_state(b.qp), IBV_QPS_ERR);
  side_close_pair(&a, &b);
}

/* Soft-RoCE drops it instead, and the receive waits for the next. */
static void test_too_long_for_rxe(void) {
  struct side a, b;
  struct side_options options = TCP_DEFAULTS;
  options.profile = "rxe";
  tcp_open_pair(&a, &b, options);
  CHECK_EQUAL(side_receive(&b, 1, 0, 64), 0);
  CHECK_EQUAL(side_send(&a, 2, 0, 65, 0), 0);
  CHECK_EQUAL(side_send(&a, 3, 0, 64, 0), 0);
  CHECK_EQUAL(tcp_poll_one(&b, &a, 1, IBV_WC_SUCCESS).byte_len, 64);
  CHECK_EQUAL(side_counters(&b).dropped, 1);
  side_close_pair(&a, &b);
}

/* Messages for receives that are posted later wait with the systems, in order; frames have to be the same. */
static void test_credit(void) {
  struct side a, b;
  struct side_options options = TCP_DEFAULTS;
  options.profile = "apple-tb5";
  side_open(&a, options);
  options.host = 1;
  side_open(&b, options);
  side_connect(&a, &b);
  tcp_settle(&a, &b);
  for (uint64_t n = 0; n < 5; n++) {
    memcpy(a.memory + n * 8, &n, 8);
    CHECK_EQUAL(side_send(&a, n, n * 8, 8, 0), 0);
  }
  for (int i = 0; i < 1000; i++) tcp_turn(&a), tcp_turn(&b);
  CHECK_EQUAL(side_counters(&b).dropped, 0);
  for (uint64_t n = 0; n < 5; n++) {
    CHECK_EQUAL(side_receive(&b, n, 0, 64), 0);
    tcp_poll_one(&b, &a, n, IBV_WC_SUCCESS);
    CHECK(memcmp(b.memory, &n, 8) == 0);
  }
  CHECK_EQUAL(side_receive(&b, 7, 0, 4097), 0);
  CHECK_EQUAL(side_send(&a, 8, 0, 4096, 0), 0);
  tcp_poll_one(&b, &a, 7, IBV_WC_LOC_LEN_ERR);
  side_close_pair(&a, &b);
}

/* Nothing that was sent over a connection comes out of a later one. */
static void test_reset_and_reconnect(void) {
  struct side a, b;
  tcp_open_pair(&a, &b, TCP_DEFAULTS);
  for (uint32_t round = 1; round <= 60; round++) {
    memset(a.memory, (int)(128 + round), 65536);
    for (int i = 0; i < 3; i++) CHECK_EQUAL(side_receive(&b, 9, 0, 65536), 0);
    for (uint64_t i = 0; i < 4; i++) CHECK_EQUAL(side_send(&a, i, 0, round % 2 ? 65536 : 8, 0), 0);
    for (uint32_t i = 0; i < round % 7; i++) tcp_turn(i % 2 ? &a : &b);
    if (round % 3)
      tcp_reconnect(&a, &b, round);
    else
      tcp_reconnect(&b, &a, round);
    memset(a.memory, (int)round, 65536);
    memset(b.memory, 0, 65536);
    CHECK_EQUAL(side_receive(&b, round, 0, 65536), 0);
    CHECK_EQUAL(side_send(&a, 5, 0, 65536, 0), 0);
    CHECK_EQUAL(tcp_poll_one(&b, &a, round, IBV_WC_SUCCESS).byte_len, 65536);
    for (int i = 0; i < 65536; i++) CHECK_EQUAL(b.memory[i], round);
  }
  CHECK_EQUAL(side_counters(&a).dropped, 0); /* they waited for the new connection */
  side_close_pair(&a, &b);
}

/* The connection breaks in the middle of a message: the SEND completes, the receive stays, a new connection is made and
 * the next message takes it. */
static void test_broken_connection(void) {
  struct side a, b;
  tcp_open_pair(&a, &b, TCP_DEFAULTS);
  for (unsigned round = 0; round < 4; round++) {
    CHECK_EQUAL(side_receive(&b, round, 0, SIDE_BYTES), 0);
    struct tcp_receiver *receiver = NULL;
    for (struct tcp_receiver *r = soft_context(b.context)->tcp->receivers; r; r = r->next)
      if (r->fd >= 0 && tcp_receiver_serves(r, soft_qp(b.qp))) receiver = r;
    CHECK(receiver);
    int small = 16384;
    CHECK_EQUAL(setsockopt(receiver->fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small), 0);
    CHECK_EQUAL(setsockopt(soft_qp(a.qp)->tcp->fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small), 0);
    CHECK_EQUAL(side_send(&a, 10, 0, SIDE_BYTES, IBV_SEND_SIGNALED), 0);
    CHECK(soft_qp(a.qp)->tcp->begun, "the whole message fits into buffers");
    TCP_UNTIL(&b, &b, receiver->left > 0 && receiver->left < SIDE_BYTES);
    CHECK_EQUAL(shutdown(round % 2 ? receiver->fd : soft_qp(a.qp)->tcp->fd, SHUT_RDWR), 0);
    tcp_poll_one(&a, &b, 10, IBV_WC_SUCCESS);
    TCP_UNTIL(&a, &b, tcp_is_open(&a));
    side_fill(a.memory, 5000, round);
    CHECK_EQUAL(side_send(&a, 11, 0, 5000, 0), 0);
    CHECK_EQUAL(tcp_poll_one(&b, &a, round, IBV_WC_SUCCESS).byte_len, 5000);
    side_verify(b.memory, 5000, round);
  }
  side_close_pair(&a, &b);
}

/* A peer that does not read delays no other one, and SENDs to it wait. */
static void test_slow_reader(void) {
  struct side a, b, slow;
  side_open(&slow, TCP_DEFAULTS);
  tcp_open_pair(&a, &b, TCP_DEFAULTS);
  struct ibv_qp *to_b = a.qp;
  a.qp = side_create_qp(&a, TCP_DEFAULTS);
  side_connect(&a, &slow);
  tcp_settle(&a, &slow);
  for (uint64_t n = 0; side_send(&a, n, 0, SIDE_BYTES, 0) == 0; n++) /* until the send queue is full */
    CHECK(n < 8);
  CHECK(soft_qp(a.qp)->sq_left < soft_qp(a.qp)->sq_posted, "the systems took it all");
  struct ibv_qp *to_slow = a.qp;
  a.qp = to_b;
  for (unsigned n = 0; n < 20; n++) check_message(&a, &b, 300000, n);
  CHECK_EQUAL(verbs_soft()->destroy_qp(to_slow), 0);
  side_close(&slow);
  side_close_pair(&a, &b);
}

/* What was sent arrives, though the sender is gone. */
static void test_sender_leaves(void) {
  struct side a, b;
  tcp_open_pair(&a, &b, TCP_DEFAULTS);
  for (uint64_t n = 0; n < 8; n++) CHECK_EQUAL(side_receive(&b, n, n * 8192, 8192), 0);
  for (unsigned n = 0; n < 8; n++) {
    side_fill(a.memory + n * 8192, 8192, n);
    CHECK_EQUAL(side_send(&a, n, n * 8192, 8192, 0), 0);
  }
  CHECK_EQUAL(soft_qp(a.qp)->sq_left, 8);
  side_close(&a);
  for (unsigned n = 0; n < 8; n++) {
    tcp_poll_one(&b, &b, n, IBV_WC_SUCCESS);
    side_verify(b.memory + n * 8192, 8192, n);
  }
  side_close(&b);
}

/* While no peer listens, SENDs are dropped, as on a cable that leads nowhere. */
static void test_no_peer(void) {
  struct side a, b;
  tcp_open_pair(&a, &b, TCP_DEFAULTS);
  side_close(&b);
  TCP_UNTIL(&a, &a, soft_qp(a.qp)->tcp->state == TCP_WAITING);
  for (uint64_t n = 0; n < 50; n++) {
    CHECK_EQUAL(side_send(&a, n, 0, 4096, IBV_SEND_SIGNALED), 0);
    tcp_poll_one(&a, &a, n, IBV_WC_SUCCESS);
  }
  CHECK_EQUAL(side_counters(&a).dropped, 50);
  side_close(&a);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"Addresses", test_addresses},
      {"ConnectError", test_connect_error},
      {"RejectedAddress", test_rejected_address},
      {"Sizes", test_sizes},
      {"Loopback", test_loopback},
      {"Gather", test_gather},
      {"LargerThanTheSystemTakes", test_larger_than_the_system_takes},
      {"NoReceive", test_no_receive},
      {"TooLong", test_too_long},
      {"BadKeyOfTheReceive", test_bad_key_of_the_receive},
      {"TooLongForRxe", test_too_long_for_rxe},
      {"Credit", test_credit},
      {"ResetAndReconnect", test_reset_and_reconnect},
      {"BrokenConnection", test_broken_connection},
      {"SlowReader", test_slow_reader},
      {"SenderLeaves", test_sender_leaves},
      {"NoPeer", test_no_peer},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
