/* Who else can reach the port of a context: strangers with no key, another key or half a handshake, and members that do
 * not keep to the rules. None of them disturbs those that are connected. */
#define _GNU_SOURCE 1
#include "tcp_pair.h"

#include "../providers/soft/tcp_handshake.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>

static int connect_to(const struct side *side) {
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in to = {
      .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(side->lid)};
  CHECK_EQUAL(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
  CHECK_EQUAL(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
  return fd;
}

static bool has_ended(int fd) {
  char bytes[256];
  ssize_t got;
  do got = recv(fd, bytes, sizeof bytes, 0);
  while (got > 0);
  return got == 0 || (errno != EAGAIN && errno != EINTR);
}

static bool hear(int fd, uint8_t bytes[16]) {
  if (recv(fd, bytes, 16, MSG_PEEK) < 16) return false;
  CHECK_EQUAL(recv(fd, bytes, 16, 0), 16);
  return true;
}

static unsigned count_receivers(const struct side *side) {
  unsigned count = 0;
  for (const struct tcp_receiver *r = soft_context(side->context)->tcp->receivers; r; r = r->next) count += r->fd >= 0;
  return count;
}

static void check_still_good(struct side *a, struct side *b) {
  for (unsigned n = 0; n < 3; n++) {
    side_fill(a->memory, 3000, n);
    CHECK_EQUAL(side_receive(b, n, 0, 3000), 0);
    CHECK_EQUAL(side_send(a, n, 0, 3000, 0), 0);
    CHECK_EQUAL(tcp_poll_one(b, a, n, IBV_WC_SUCCESS).byte_len, 3000);
    side_verify(b->memory, 3000, n);
  }
}

/* Two sides that never meet: neither connection is made, SENDs are dropped, nothing arrives. */
static void check_no_connection(struct side_options of_a, struct side_options of_b) {
  struct side a, b;
  side_open(&a, of_a);
  side_open(&b, of_b);
  side_connect(&a, &b);
  CHECK_EQUAL(side_receive(&b, 1, 0, 64), 0);
  CHECK_EQUAL(side_send(&a, 2, 0, 64, IBV_SEND_SIGNALED), 0);
  tcp_poll_one(&a, &b, 2, IBV_WC_SUCCESS);
  CHECK_EQUAL(side_counters(&a).dropped, 1);
  CHECK_EQUAL(side_counters(&a).bytes_sent, 0);
  CHECK(!tcp_is_open(&a) && !tcp_is_open(&b));
  CHECK_EQUAL(soft_qp(b.qp)->shared->claim, soft_qp(b.qp)->rq_head);
  side_close_pair(&a, &b);
}

static void test_other_key(void) {
  static const uint8_t other[VERBS_KEY_BYTES] = "fifteen Letters";
  struct side_options options = TCP_DEFAULTS;
  options.key = other;
  check_no_connection(TCP_DEFAULTS, options);
}

static void test_other_profile(void) {
  struct side_options options = TCP_DEFAULTS;
  options.profile = "rxe";
  check_no_connection(TCP_DEFAULTS, options);
}

static void test_garbage(void) {
  struct side a, b;
  tcp_open_pair(&a, &b, TCP_DEFAULTS);
  uint64_t random = 1;
  for (int round = 0; round < 100; round++) {
    char bytes[300];
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (char)((random = random * 6364136223846793005u + 1) >> 56);
    int fd = connect_to(&b);
    size_t length = sizeof(struct tcp_greeting) + (size_t)round * 2;
    CHECK_EQUAL(send(fd, bytes, length, 0), length);
    TCP_UNTIL(&a, &b, has_ended(fd));
    close(fd);
  }
  CHECK_EQUAL(count_receivers(&b), 1);
  check_still_good(&a, &b);
  side_close_pair(&a, &b);
}

/* The greeting that a peer has sent to another process, or before, is worth nothing: the challenge is another. */
static void test_recorded_greeting(void) {
  struct side a, b;
  tcp_open_pair(&a, &b, TCP_DEFAULTS);
  struct tcp_greeting recorded = soft_qp(a.qp)->tcp->greeting;
  int fd = connect_to(&b);
  CHECK_EQUAL(send(fd, &recorded, sizeof recorded, 0), sizeof recorded);
  TCP_UNTIL(&a, &b, has_ended(fd));
  close(fd);
  CHECK(tcp_is_open(&a));
  check_still_good(&a, &b);
  side_close_pair(&a, &b);
}

/* More than there is room for, all silent: they make room for each other and for peers, and end when their time is
 * up. */
static void test_half_handshakes(void) {
  enum { STRANGERS = 300 };
  static int fds[STRANGERS];
  struct side a, b;
  side_open(&a, TCP_DEFAULTS);
  side_open(&b, TCP_DEFAULTS);
  side_to_rts(b.qp, side_address(&a));
  for (int i = 0; i < STRANGERS; i++) {
    fds[i] = connect_to(&b);
    if (i % 2) CHECK_EQUAL(send(fds[i], "mlxdist", 8, 0), 8); /* as a greeting begins */
    tcp_turn(&b);
  }
  for (int i = 0; i < 20; i++) tcp_turn(&b);
  CHECK_EQUAL(count_receivers(&b), TCP_MAX_STRANGERS);
  side_to_rts(a.qp, side_address(&b));
  tcp_settle(&a, &b);
  check_still_good(&a, &b);
  for (struct tcp_receiver *r = soft_context(b.context)->tcp->receivers; r; r = r->next)
    if (!r->open) r->until_ns = 0; /* as if it were later */
  tcp_turn(&b);
  CHECK_EQUAL(count_receivers(&b), 1);
  for (int i = 0; i < STRANGERS; i++) {
    CHECK(has_ended(fds[i]));
    close(fds[i]);
  }
  check_still_good(&a, &b);
  side_close_pair(&a, &b);
}

/* A member in its own right, with the address of `of`, byte by byte. */
static int join(struct side *to, const struct side *of, uint32_t psn) {
  int fd = connect_to(to);
  uint8_t challenge[16], proof[16], expected[16];
  TCP_UNTIL(to, to, hear(fd, challenge));
  struct tcp_greeting greeting = {.port = htonl(of->lid),
                                  .profile = htonl(SOFT_IDEAL),
                                  .to_qp = htonl(to->qp->qp_num),
                                  .from_qp = htonl(of->qp->qp_num),
                                  .psn = htonl(psn)};
  memcpy(greeting.gid, of->gid.raw, sizeof greeting.gid);
  CHECK(tcp_greet(&greeting, tcp_key, challenge));
  for (size_t i = 0; i < sizeof greeting; i++) {
    CHECK_EQUAL(send(fd, (char *)&greeting + i, 1, 0), 1);
    tcp_turn(to);
  }
  TCP_UNTIL(to, to, hear(fd, proof));
  tcp_proof(&greeting, tcp_key, challenge, expected);
  CHECK(tcp_same_proof(proof, expected));
  return fd;
}

static void send_header(int fd, uint32_t kind, uint32_t length) {
  struct tcp_header header = {.kind = htonl(kind), .length = htonl(length)};
  for (size_t i = 0; i < sizeof header; i++) CHECK_EQUAL(send(fd, (char *)&header + i, 1, 0), 1);
}

/* A header that no peer sends ends the connection, and takes no receive. */
static void test_bad_headers(void) {
  struct side a, b;
  tcp_open_pair(&a, &b, TCP_DEFAULTS);
  static const uint32_t headers[][2] = {{0, 8}, {5, 8}, {UINT32_MAX, 0}, {1, SOFT_MAX_MESSAGE + 1}, {1, UINT32_MAX}};
  CHECK_EQUAL(side_receive(&b, 1, 0, 64), 0);
  for (int i = 0; i < 5; i++) {
    int fd = join(&b, &a, SIDE_PSN);
    send_header(fd, headers[i][0], headers[i][1]);
    TCP_UNTIL(&b, &b, has_ended(fd));
    close(fd);
  }
  CHECK_EQUAL(side_state(b.qp), IBV_QPS_RTS);
  int fd = join(&b, &a, SIDE_PSN); /* and the receive is still there */
  send_header(fd, TCP_SEND, 3);
  CHECK_EQUAL(send(fd, "abc", 3, 0), 3);
  CHECK_EQUAL(tcp_poll_one(&b, &b, 1, IBV_WC_SUCCESS).byte_len, 3);
  close(fd);
  side_close_pair(&a, &b);
}

/* A member that is not this queue pair's peer, or was it before, delivers nothing. */
static void test_not_the_peer(void) {
  struct side a, b, c;
  side_open(&c, TCP_DEFAULTS);
  tcp_open_pair(&a, &b, TCP_DEFAULTS);
  CHECK_EQUAL(side_receive(&b, 1, 0, 64), 0);
  int of_other_context = join(&b, &c, SIDE_PSN), of_other_time = join(&b, &a, SIDE_PSN + 1);
  struct side other_qp = a;
  other_qp.qp = side_create_qp(&a, SIDE_DEFAULTS);
  int of_other_qp = join(&b, &other_qp, SIDE_PSN);
  int fds[] = {of_other_context, of_other_time, of_other_qp};
  uint64_t dropped = side_counters(&b).dropped;
  for (int i = 0; i < 3; i++) {
    send_header(fds[i], TCP_SEND, 3);
    CHECK_EQUAL(send(fds[i], "abc", 3, 0), 3);
    TCP_UNTIL(&b, &b, side_counters(&b).dropped == dropped + (uint64_t)i + 1);
    close(fds[i]);
  }
  struct ibv_wc wc;
  CHECK_EQUAL(ibv_poll_cq(b.cq, 1, &wc), 0);
  CHECK_EQUAL(verbs_soft()->destroy_qp(other_qp.qp), 0);
  side_close(&c);
  side_close_pair(&a, &b);
}

/* Members that come and never go: the table stays bounded, and those that a queue pair has stay in it. */
static void test_many_members(void) {
  struct side a, b;
  tcp_open_pair(&a, &b, TCP_DEFAULTS);
  struct side other = a;
  static int fds[TCP_MAX_RECEIVERS + 40];
  for (unsigned i = 0; i < TCP_MAX_RECEIVERS + 40; i++) {
    other.lid = (uint16_t)(1 + i);
    fds[i] = join(&b, &other, SIDE_PSN);
  }
  CHECK_EQUAL(count_receivers(&b), TCP_MAX_RECEIVERS);
  CHECK(tcp_is_open(&a));
  check_still_good(&a, &b);
  for (unsigned i = 0; i < TCP_MAX_RECEIVERS + 40; i++) close(fds[i]);
  side_close_pair(&a, &b);
}

/* A listener that is not the peer: it gets a greeting, and not one byte of a message. */
static void test_false_listener(void) {
  int listener = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  CHECK_EQUAL(bind(listener, (struct sockaddr *)&address, sizeof address), 0);
  CHECK_EQUAL(listen(listener, 8), 0);
  CHECK_EQUAL(getsockname(listener, (struct sockaddr *)&address, &length), 0);
  struct side a;
  side_open(&a, TCP_DEFAULTS);
  struct side_address there = side_address(&a);
  there.lid = ntohs(address.sin_port);
  side_to_rts(a.qp, there);
  CHECK_EQUAL(side_send(&a, 1, 0, 64, IBV_SEND_SIGNALED), 0);
  int fd = accept(listener, NULL, NULL);
  char bytes[sizeof(struct tcp_greeting) + 1];
  CHECK_EQUAL(send(fd, bytes, TCP_NONCE_BYTES, 0), TCP_NONCE_BYTES);
  CHECK_EQUAL(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
  TCP_UNTIL(&a, &a, recv(fd, bytes, sizeof bytes, MSG_PEEK) >= (ssize_t)sizeof(struct tcp_greeting));
  CHECK_EQUAL(recv(fd, bytes, sizeof bytes, 0), sizeof(struct tcp_greeting));
  struct tcp_greeting *greeting = (void *)bytes;
  CHECK_EQUAL(send(fd, greeting->proof, SIPHASH_BYTES, 0), SIPHASH_BYTES); /* its own words */
  tcp_poll_one(&a, &a, 1, IBV_WC_SUCCESS);
  CHECK_EQUAL(side_counters(&a).dropped, 1);
  CHECK(has_ended(fd));
  close(fd);
  close(listener);
  side_close(&a);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"OtherKey", test_other_key},
      {"OtherProfile", test_other_profile},
      {"Garbage", test_garbage},
      {"RecordedGreeting", test_recorded_greeting},
      {"HalfHandshakes", test_half_handshakes},
      {"BadHeaders", test_bad_headers},
      {"NotThePeer", test_not_the_peer},
      {"ManyMembers", test_many_members},
      {"FalseListener", test_false_listener},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
