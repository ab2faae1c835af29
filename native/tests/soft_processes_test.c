/* The software provider between processes: exact data, peers that die at any moment, children that inherit
 * nothing, and nothing left behind. */
#define _POSIX_C_SOURCE 200809L
#include "../providers/soft/soft.h"
#include "check.h"
#include "soft_side.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>

struct process {
  pid_t pid;
  int fd; /* side channel */
};

/* A child that runs `body` with its end of the side channel and exits with 0 if no check failed. */
static struct process start(void (*body)(int fd)) {
  int fds[2];
  CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
  pid_t pid = fork();
  if (pid == 0) {
    close(fds[0]);
    alarm(CHECK_SECONDS);
    body(fds[1]);
    exit(0);
  }
  close(fds[1]);
  return (struct process){pid, fds[0]};
}

static void finish(struct process *process) {
  CHECK_EQUAL(check_wait(process->pid), 0);
  close(process->fd);
}

static void kill_process(struct process *process) {
  CHECK_EQUAL(kill(process->pid, SIGKILL), 0);
  int status = check_wait(process->pid);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  close(process->fd);
}

static void tell(int fd, struct side_address address) {
  CHECK_EQUAL(write(fd, &address, sizeof address), sizeof address);
}

static struct side_address hear(int fd) {
  struct side_address address;
  CHECK_EQUAL(read(fd, &address, sizeof address), sizeof address);
  return address;
}

/* Connects the side to the one at the other end, and returns when both are connected. */
static void meet(int fd, struct side *side) {
  tell(fd, side_address(side));
  side_to_rts(side->qp, hear(fd));
  tell(fd, side_address(side));
  hear(fd);
}

/* What a process could leave behind: descriptors, mappings and names, counted where the system shows them. */
static int count_entries(const char *path, const char *containing) {
  DIR *directory = opendir(path);
  if (!directory) return 0;
  int count = 0;
  for (struct dirent *entry; (entry = readdir(directory));) count += strstr(entry->d_name, containing) != NULL;
  closedir(directory);
  return count;
}

static int count_descriptors(void) {
  int count = 0;
  for (int fd = 0; fd < 1024; fd++) count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

static int count_mappings(void) {
  FILE *maps = fopen("/proc/self/maps", "r");
  if (!maps) return 0; /* macOS */
  char line[512];
  int count = 0;
  while (fgets(line, sizeof line, maps)) count += strstr(line, "memfd:mlxdist") || strstr(line, "/mlxdist-");
  fclose(maps);
  return count;
}

static int count_names(void) { return count_entries("/dev/shm", "mlxdist-"); }

static const size_t sizes[] = {0, 1, 63, 64, 65, 4095, 4096, 4097, 256 << 10};

/* Every size, one message at a time in each direction, each side waiting for the other's. */
static void trade(int fd, int first) {
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  CHECK_EQUAL(side_modify(side.qp, IBV_QPS_INIT, side_address(&side)), 0);
  CHECK_EQUAL(side_receive(&side, 0, SIDE_BYTES / 2, SIDE_BYTES / 2), 0); /* in INIT, before anybody can send */
  tell(fd, side_address(&side));
  struct side_address peer = hear(fd);
  CHECK_EQUAL(side_modify(side.qp, IBV_QPS_RTR, peer), 0);
  CHECK_EQUAL(side_modify(side.qp, IBV_QPS_RTS, peer), 0);
  tell(fd, peer);
  hear(fd);
  for (unsigned n = 0; n < 90; n++) {
    size_t length = sizes[n % 9];
    side_fill(side.memory, length, n * 2 + (unsigned)first);
    if (first) CHECK_EQUAL(side_send(&side, 99, 0, length, IBV_SEND_SIGNALED), 0);
    struct ibv_wc wc[2]; /* our last send, then the peer's message */
    int count = first || n > 0 ? 2 : 1;
    side_poll(&side, wc, count);
    for (int i = 0; i < count; i++) CHECK_EQUAL(wc[i].status, IBV_WC_SUCCESS);
    CHECK_EQUAL(wc[count - 1].wr_id, n);
    CHECK_EQUAL(wc[count - 1].byte_len, length);
    side_verify(side.memory + SIDE_BYTES / 2, length, n * 2 + (unsigned)!first);
    CHECK_EQUAL(side_receive(&side, n + 1, SIDE_BYTES / 2, SIDE_BYTES / 2), 0);
    if (!first) CHECK_EQUAL(side_send(&side, 99, 0, length, IBV_SEND_SIGNALED), 0);
  }
  CHECK_EQUAL(side_counters(&side).dropped, 0);
  side_close(&side);
}

static void trade_second(int fd) { trade(fd, 0); }

static void test_two_processes(void) {
  struct process peer = start(trade_second);
  trade(peer.fd, 1);
  finish(&peer);
}

static void post_three_and_wait(int fd) {
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  meet(fd, &side);
  for (uint64_t i = 0; i < 3; i++) CHECK_EQUAL(side_receive(&side, i, 0, 4096), 0);
  tell(fd, side_address(&side));
  pause();
}

/* A dead peer is silence: its memory stays mapped, sends succeed, and what has no receive is dropped. */
static void test_peer_killed(void) {
  int names = count_names();
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  struct process peer = start(post_three_and_wait);
  meet(peer.fd, &side);
  struct side_address address = hear(peer.fd);
  CHECK_EQUAL(side_send(&side, 0, 0, 4096, IBV_SEND_SIGNALED), 0);
  side_poll_one(&side, 0, IBV_WC_SUCCESS);
  kill_process(&peer);
  for (uint64_t i = 0; i < 50; i++) {
    CHECK_EQUAL(side_send(&side, i, 0, 4096, IBV_SEND_SIGNALED), 0);
    side_poll_one(&side, i, IBV_WC_SUCCESS);
  }
  CHECK_EQUAL(side_counters(&side).bytes_sent, 3 * 4096);
  CHECK_EQUAL(side_counters(&side).dropped, 48);

  /* Once let go, it cannot be found again. */
  CHECK_EQUAL(side_modify(side.qp, IBV_QPS_RESET, address), 0);
  CHECK_EQUAL(side_modify(side.qp, IBV_QPS_INIT, address), 0);
  if (soft_context(side.context)->segment->fd >= 0) { /* a segment without a name dies with its owner */
    int error = side_modify(side.qp, IBV_QPS_RTR, address);
    CHECK(error == ENOENT || error == ESRCH, "%d", error);
  }
  side_close(&side);
  CHECK_EQUAL(count_names(), names);
}

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Sends as fast as it can and receives what comes. Kills the `peer` after a while, and returns when it is dead.
 * Returns the bytes sent. */
static uint64_t fire(int fd, pid_t peer, int64_t duration) {
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  meet(fd, &side);
  for (uint64_t slot = 1; slot <= 8; slot++) CHECK_EQUAL(side_receive(&side, slot, slot * 65536, 65536), 0);
  tell(fd, side_address(&side));
  hear(fd);
  int64_t end = nanoseconds() + duration;
  int status = 0;
  while (!peer || waitpid(peer, &status, WNOHANG) == 0) {
    if (peer && nanoseconds() > end) CHECK_EQUAL(kill(peer, SIGKILL), 0);
    CHECK_EQUAL(side_send(&side, 0, 0, 65536, IBV_SEND_SIGNALED), 0);
    struct ibv_wc wc[8];
    int count = ibv_poll_cq(side.cq, 8, wc);
    for (int i = 0; i < count; i++) {
      CHECK_EQUAL(wc[i].status, IBV_WC_SUCCESS);
      if (wc[i].opcode & IBV_WC_RECV) CHECK_EQUAL(side_receive(&side, wc[i].wr_id, wc[i].wr_id * 65536, 65536), 0);
    }
  }
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "the peer ended by itself, status %d", status);
  uint64_t bytes = side_counters(&side).bytes_sent;
  side_close(&side);
  return bytes;
}

static void fire_until_killed(int fd) { fire(fd, 0, 0); }

/* Killed while both send, often in the middle of a copy: the survivor can still take everything down, in
 * bounded time, and no name is left. */
static void test_peer_killed_while_sending(void) {
  int names = count_names();
  uint64_t bytes = 0;
  for (int round = 0; round < 40; round++) {
    struct process peer = start(fire_until_killed);
    bytes += fire(peer.fd, peer.pid, 5000000 + round * 1234567);
    close(peer.fd);
  }
  CHECK(bytes > 0);
  CHECK_EQUAL(count_names(), names);
}

static struct side inherited;

static void use_inheritance(int fd) {
  (void)fd;
  CHECK_EQUAL(count_mappings(), 0);
  CHECK_EQUAL(soft_context(inherited.context)->segment->fd, -1);
  side_close(&inherited); /* as an exit handler in a forked child would */

  struct side own;
  side_open(&own, SIDE_DEFAULTS);
  side_to_rts(own.qp, side_address(&own));
  CHECK_EQUAL(side_receive(&own, 1, 0, 8), 0);
  CHECK_EQUAL(side_send(&own, 2, 8, 8, 0), 0);
  side_poll_one(&own, 1, IBV_WC_SUCCESS);
  side_close(&own);
}

/* A forked child has neither the memory nor the descriptor, may close what it inherited without harm to the
 * parent, and can open a device of its own. */
static void test_forked_child(void) {
  side_open(&inherited, SIDE_DEFAULTS);
  side_to_rts(inherited.qp, side_address(&inherited));
  CHECK_EQUAL(side_receive(&inherited, 1, 0, 8), 0);
  struct process child = start(use_inheritance);
  finish(&child);
  CHECK_EQUAL(side_send(&inherited, 2, 8, 8, 0), 0);
  side_poll_one(&inherited, 1, IBV_WC_SUCCESS);
  side_close(&inherited);
}

static void test_nothing_left(void) {
  int descriptors = count_descriptors(), mappings = count_mappings(), names = count_names();
  for (int round = 0; round < 30; round++) {
    struct side a, b;
    side_open_pair(&a, &b, SIDE_DEFAULTS);
    CHECK_EQUAL(side_receive(&b, 1, 0, 64), 0);
    CHECK_EQUAL(side_send(&a, 1, 0, 64, 0), 0);
    if (round % 2)
      side_close_pair(&a, &b);
    else
      side_close_pair(&b, &a);
  }
  CHECK_EQUAL(count_descriptors(), descriptors);
  CHECK_EQUAL(count_mappings(), mappings);
  CHECK_EQUAL(count_names(), names);
}

/* A process is mapped once, however many queue pairs lead there. */
static void test_mapped_once(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  CHECK(soft_qp(a.qp)->remote.segment == soft_context(b.context)->segment);
  CHECK_EQUAL(soft_context(b.context)->segment->references, 2);
  CHECK_EQUAL(soft_context(a.context)->segment->references, 2);
  side_close_pair(&a, &b);
}

static void connect_and_post(int fd) {
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  meet(fd, &side);
  CHECK_EQUAL(side_receive(&side, 1, 0, 64), 0);
  CHECK(!soft_context(side.context)->segment->named);
  tell(fd, side_address(&side));
  pause();
}

/* Where a segment needs a name, the name is gone once every queue pair's peer has mapped it, so that a SIGKILL
 * from then on leaves nothing. Until then the last peer must find it. */
static void test_name_is_removed(void) {
  int before = count_names();
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  int names = soft_context(side.context)->segment->named; /* not on Linux */
  CHECK_EQUAL(count_names(), before + names);
  struct ibv_qp *first = side.qp, *second = side_create_qp(&side, SIDE_DEFAULTS);

  struct process peer = start(connect_and_post);
  meet(peer.fd, &side);
  hear(peer.fd);
  CHECK_EQUAL(side_receive(&side, 1, 0, 64), 0);
  CHECK_EQUAL(soft_context(side.context)->segment->named, names); /* the second queue pair has no peer yet */
  CHECK_EQUAL(count_names(), before + names);
  kill_process(&peer);
  CHECK_EQUAL(count_names(), before + names);

  side.qp = second;
  peer = start(connect_and_post);
  meet(peer.fd, &side);
  hear(peer.fd);
  CHECK_EQUAL(side_receive(&side, 1, 0, 64), 0);
  CHECK(!soft_context(side.context)->segment->named);
  CHECK_EQUAL(count_names(), before);
  kill_process(&peer);
  CHECK_EQUAL(count_names(), before);
  CHECK_EQUAL(verbs_soft()->destroy_qp(first), 0);
  side_close(&side);
}

static void open_and_pause(int fd) {
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  tell(fd, side_address(&side));
  pause();
}

/* Killed before anybody has mapped its segment: the next process removes the name, and no name of a living one. */
static void test_names_of_the_dead(void) {
  int before = count_names();
  struct process living = start(open_and_pause), dead = start(open_and_pause);
  hear(living.fd);
  hear(dead.fd);
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  int names = soft_context(side.context)->segment->named; /* not on Linux */
  side_close(&side);
  CHECK_EQUAL(count_names(), before + 2 * names);
  kill_process(&dead);
  CHECK_EQUAL(count_names(), before + 2 * names);
  side_open(&side, SIDE_DEFAULTS);
  CHECK_EQUAL(count_names(), before + 2 * names);
  side_close(&side);
  CHECK_EQUAL(count_names(), before + names);
  kill_process(&living);
  side_open(&side, SIDE_DEFAULTS);
  side_close(&side);
  CHECK_EQUAL(count_names(), before);
}

/* Only this user may open a segment, by whatever path the system has. */
static void test_mode(void) {
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  const struct segment *segment = soft_context(side.context)->segment;
  char path[64];
  uint64_t nonce;
  memcpy(&nonce, &segment->gid, sizeof nonce);
  if (segment->fd >= 0)
    snprintf(path, sizeof path, "/proc/self/fd/%d", segment->fd);
  else
    snprintf(path, sizeof path, "/dev/shm/mlxdist-%016llx", (unsigned long long)nonce);
  struct stat status;
  if (!stat(path, &status)) { /* macOS shows no file */
    CHECK_EQUAL(status.st_mode & 07777, 0600);
    CHECK_EQUAL(status.st_uid, getuid());
  }
  side_close(&side);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"TwoProcesses", test_two_processes},
      {"PeerKilled", test_peer_killed},
      {"PeerKilledWhileSending", test_peer_killed_while_sending},
      {"ForkedChild", test_forked_child},
      {"NothingLeft", test_nothing_left},
      {"MappedOnce", test_mapped_once},
      {"NameIsRemoved", test_name_is_removed},
      {"NamesOfTheDead", test_names_of_the_dead},
      {"Mode", test_mode},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
