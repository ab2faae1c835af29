/* TCP between processes and between threads: exact data in both directions at once, peers that die or stop at any
 * moment, children that keep no connection, and nothing left behind. Takes the number of messages from MESSAGES. */
#define _GNU_SOURCE 1
#include "soft_stream.h"
#include "tcp_pair.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>

static void run_side(int fd) {
  struct side side;
  struct side_options options = STREAM_OPTIONS;
  options.key = tcp_key;
  side_open(&side, options);
  side_to_rts(side.qp, stream_exchange(fd, &side));
  stream_prepare(&side);
  stream_exchange(fd, &side); /* a barrier: the peer's receives are posted */
  stream_run(&side, stream_messages(20000));
  stream_exchange(fd, &side); /* the peer has everything */
  side_close(&side);
}

static void test_two_processes(void) { stream_in_two_processes(run_side); }

static void test_two_threads(void) { stream_in_two_threads(run_side); }

/* Sends and receives as fast as it can; what arrives is whole. One round. */
static void fire(struct side *side) {
  struct ibv_wc wc[8];
  memset(side->memory, (int)(side_counters(side).sends & 0x7f), 65536);
  int error = side_send(side, 0, 0, 65536, IBV_SEND_SIGNALED);
  CHECK(!error || error == ENOMEM);
  int count = ibv_poll_cq(side->cq, 8, wc);
  for (int i = 0; i < count; i++) {
    CHECK_EQUAL(wc[i].status, IBV_WC_SUCCESS);
    if (wc[i].opcode & IBV_WC_RECV) CHECK_EQUAL(side_receive(side, wc[i].wr_id, wc[i].wr_id * 65536, 65536), 0);
  }
}

static void open_fire(int fd, struct side *side) {
  side_open(side, TCP_DEFAULTS);
  side_to_rts(side->qp, stream_exchange(fd, side));
  for (uint64_t slot = 1; slot <= 8; slot++) CHECK_EQUAL(side_receive(side, slot, slot * 65536, 65536), 0);
  stream_exchange(fd, side);
}

static pid_t start_firing(int *fd) {
  int fds[2];
  CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
  pid_t pid = fork();
  if (pid == 0) {
    struct side side;
    alarm(CHECK_SECONDS);
    close(fds[0]);
    open_fire(fds[1], &side);
    for (;;) fire(&side);
  }
  close(fds[1]);
  *fd = fds[0];
  return pid;
}

/* Killed while both send, at many different points: the survivor's SENDs all complete, and it can take all down. */
static void test_peer_killed(void) {
  for (int round = 0; round < 20; round++) {
    struct side side;
    int fd, status;
    pid_t peer = start_firing(&fd);
    open_fire(fd, &side);
    while (side_counters(&side).bytes_sent < (uint64_t)round * 200000) fire(&side);
    CHECK_EQUAL(kill(peer, SIGKILL), 0);
    while (waitpid(peer, &status, WNOHANG) == 0) fire(&side);
    uint64_t dropped = side_counters(&side).dropped;
    while (side_counters(&side).dropped < dropped + 50) fire(&side);
    close(fd);
    side_close(&side);
  }
}

/* A peer that is stopped takes nothing; its SENDs stay where they are, and go on when it does. */
static void test_peer_stopped(void) {
  struct side side;
  int fd;
  pid_t peer = start_firing(&fd);
  open_fire(fd, &side);
  while (side_counters(&side).bytes_sent < 1000000) fire(&side);
  CHECK_EQUAL(kill(peer, SIGSTOP), 0);
  int status;
  CHECK_EQUAL(waitpid(peer, &status, WUNTRACED), peer);
  while (soft_qp(side.qp)->sq_posted - soft_qp(side.qp)->sq_retired < 8) fire(&side); /* until nothing more fits */
  uint64_t sent = side_counters(&side).bytes_sent;
  CHECK_EQUAL(kill(peer, SIGCONT), 0);
  while (side_counters(&side).bytes_sent < sent + 10000000) fire(&side);
  CHECK_EQUAL(kill(peer, SIGKILL), 0);
  check_wait(peer);
  close(fd);
  side_close(&side);
}

static int count_descriptors(void) {
  int count = 0;
  for (int fd = 0; fd < 1024; fd++) count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

/* A forked child keeps no connection: the peer sees the end though the child lives. It may close what it inherited,
 * without harm to the parent or to sockets of its own. */
static void test_forked_child(void) {
  struct side a, b;
  int fds[2], descriptors = count_descriptors();
  tcp_open_pair(&a, &b, TCP_DEFAULTS);
  CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
  pid_t child = fork();
  if (child == 0) {
    char byte;
    close(fds[0]);
    CHECK_EQUAL(count_descriptors(), descriptors + 1);
    struct side c, d;
    tcp_open_pair(&c, &d, TCP_DEFAULTS);
    tcp_turn(&a);
    side_close_pair(&a, &b);
    CHECK_EQUAL(side_receive(&d, 1, 0, 8), 0);
    CHECK_EQUAL(side_send(&c, 2, 0, 8, 0), 0);
    tcp_poll_one(&d, &c, 1, IBV_WC_SUCCESS);
    side_close_pair(&c, &d);
    CHECK_EQUAL(write(fds[1], "", 1), 1);
    CHECK_EQUAL(read(fds[1], &byte, 1), 0); /* until the parent is done */
    _exit(0);
  }
  char byte;
  close(fds[1]);
  CHECK_EQUAL(read(fds[0], &byte, 1), 1);
  CHECK_EQUAL(side_receive(&b, 1, 0, 8), 0);
  CHECK_EQUAL(side_send(&a, 2, 0, 8, 0), 0);
  tcp_poll_one(&b, &a, 1, IBV_WC_SUCCESS);
  side_close(&b);
  TCP_UNTIL(&a, &a, soft_qp(a.qp)->tcp->state == TCP_WAITING);
  close(fds[0]);
  CHECK_EQUAL(check_wait(child), 0);
  side_close(&a);
}

static void test_nothing_left(void) {
  int descriptors = count_descriptors();
  for (int round = 0; round < 20; round++) {
    struct side a, b;
    side_open_pair(&a, &b, TCP_DEFAULTS);
    CHECK_EQUAL(side_receive(&b, 1, 0, 64), 0);
    CHECK_EQUAL(side_send(&a, 1, 0, 64, 0), 0);
    for (int turn = 0; turn < round; turn++) tcp_turn(turn % 2 ? &a : &b);
    if (round % 2)
      side_close_pair(&a, &b);
    else
      side_close_pair(&b, &a);
    CHECK_EQUAL(count_descriptors(), descriptors);
  }
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"TwoProcesses", test_two_processes}, {"TwoThreads", test_two_threads},   {"PeerKilled", test_peer_killed},
      {"PeerStopped", test_peer_stopped},   {"ForkedChild", test_forked_child}, {"NothingLeft", test_nothing_left},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
