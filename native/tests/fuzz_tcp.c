/*
 * Fuzzes what a context does with bytes that come over a TCP connection: to its listener from a stranger, from a member
 * that has proven the key, and from what it takes for its peer's listener.
 *
 * An input begins with a byte that says which. Then come records: a byte with what happens to the queue pair before,
 * and how many of the bytes that follow are sent at once. The region that the peer may write to has another key and
 * address in every run: four and eight letters stand for them.
 */
#define _GNU_SOURCE 1
#include "tcp_pair.h"

#include "../providers/soft/tcp_handshake.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/socket.h>

enum { STRANGER, MEMBER, FALSE_LISTENER, KINDS };
enum { RECEIVE = 0x40, RESET = 0x80, LENGTH = 0x3f }; /* of a record's first byte */

#define SLOT_BYTES 5000

static struct side side;
static struct side_address peer;
static int listener; /* the peer's */
static uint64_t slots;
static struct ibv_mr *writable; /* a region that the peer may write to */

static char region[SLOT_BYTES];

#define require(condition)                                                                                             \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      fprintf(stderr, "%s:%d: not so: %s (errno %d)\n", __FILE__, __LINE__, #condition, errno);                        \
      abort();                                                                                                         \
    }                                                                                                                  \
  } while (0)

static void open_side(void) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  listener = socket(AF_INET, SOCK_STREAM, 0);
  require(!bind(listener, (struct sockaddr *)&address, sizeof address) && !listen(listener, 16));
  require(!getsockname(listener, (struct sockaddr *)&address, &length) && !fcntl(listener, F_SETFL, O_NONBLOCK));
  side_open(&side, TCP_DEFAULTS);
  writable = verbs_soft()->reg_mr(side.pd, region, sizeof region, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  require(writable != NULL);
  peer = side_address(&side);
  peer.lid = ntohs(address.sin_port);
  peer.qp_num = 77;
}

static void connect_qp(void) {
  struct ibv_qp_attr attr = {.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE};
  require(!side_modify(side.qp, IBV_QPS_RESET, peer));
  side_to_rts(side.qp, peer);
  require(!verbs_soft()->modify_qp(side.qp, &attr, IBV_QP_ACCESS_FLAGS));
}

/* Closing leaves no connection behind in the system: there are many inputs a second, and ports are few. */
static int prepare(int fd) {
  struct linger at_once = {.l_onoff = 1};
  require(!setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) && !fcntl(fd, F_SETFL, O_NONBLOCK));
  return fd;
}

static int connect_to_side(void) {
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in to = {
      .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(side.lid)};
  int status;
  /* libFuzzer's clock interrupts, and a busy machine lets even a connection to itself wait for that long. */
  do status = connect(fd, (struct sockaddr *)&to, sizeof to);
  while (status && errno == EINTR);
  require(!status || errno == EISCONN);
  return prepare(fd);
}

/* What its queue pair connects to. Connections of inputs before may come first. */
static int accept_side(void) {
  int fd = -1, next;
  while (fd < 0) fd = accept(listener, NULL, NULL);
  while ((next = accept(listener, NULL, NULL)) >= 0) {
    close(prepare(fd));
    fd = next;
  }
  return prepare(fd);
}

static void greet(int fd) {
  uint8_t challenge[TCP_NONCE_BYTES];
  struct tcp_greeting greeting = {.port = htonl(peer.lid),
                                  .profile = htonl(SOFT_IDEAL),
                                  .to_qp = htonl(side.qp->qp_num),
                                  .from_qp = htonl(peer.qp_num),
                                  .psn = htonl(SIDE_PSN)};
  memcpy(greeting.gid, peer.gid.raw, sizeof greeting.gid);
  while (recv(fd, challenge, sizeof challenge, 0) < (ssize_t)sizeof challenge) tcp_turn(&side);
  require(tcp_greet(&greeting, tcp_key, challenge));
  require(send(fd, &greeting, sizeof greeting, MSG_NOSIGNAL) == (ssize_t)sizeof greeting);
  while (recv(fd, challenge, sizeof challenge, 0) < (ssize_t)sizeof challenge) tcp_turn(&side);
}

static void poll_side(void) {
  struct ibv_wc wc[8];
  int count = ibv_poll_cq(side.cq, 8, wc);
  require(count >= 0);
  for (int i = 0; i < count; i++) {
    if (!(wc[i].opcode & IBV_WC_RECV)) continue;
    enum ibv_wc_status status = wc[i].status;
    require(status == IBV_WC_SUCCESS || status == IBV_WC_LOC_LEN_ERR || status == IBV_WC_WR_FLUSH_ERR);
    require(status != IBV_WC_SUCCESS || wc[i].byte_len <= SLOT_BYTES);
  }
}

/* Puts key and address where the input names them. */
static void name_region(uint8_t *bytes, size_t size) {
  uint32_t words[] = {htonl(writable->rkey), htonl((uint32_t)((uintptr_t)region >> 32)),
                      htonl((uint32_t)(uintptr_t)region)};
  for (size_t at = 0; at + 12 <= size; at++) {
    if (memcmp(bytes + at, "rkey", 4) == 0) memcpy(bytes + at, words, 4);
    if (memcmp(bytes + at, "address:", 8) == 0) memcpy(bytes + at, words + 1, 8);
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
  static uint8_t bytes[1 << 16];
  if (!side.context) open_side();
  if (!size || size > sizeof bytes) return 0;
  memcpy(bytes, input, size);
  name_region(bytes, size);
  unsigned kind = bytes[0] % KINDS;
  connect_qp();
  side_send(&side, 1, 0, 3000, IBV_SEND_SIGNALED);
  int fd = kind == FALSE_LISTENER ? accept_side() : connect_to_side();
  if (kind == MEMBER) greet(fd);
  for (size_t at = 1; at < size;) {
    uint8_t what = bytes[at++];
    if (what & RESET) connect_qp();
    if ((what & RECEIVE) && !side_receive(&side, slots, slots % 8 * SLOT_BYTES, SLOT_BYTES)) slots++;
    size_t length = what & LENGTH;
    if (length > size - at) length = size - at;
    if (length && send(fd, bytes + at, length, MSG_NOSIGNAL) < 0) break; /* it has been cut off */
    at += length;
    for (int i = 0; i < 2; i++) poll_side();
  }
  close(fd);
  for (int i = 0; i < 16; i++) poll_side();
  return 0;
}
