/* Two processes; the program starts the other one itself, as another program of its own. */
#define _GNU_SOURCE
#include "check.h"
#include "softverbs_end.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>

static char *own_path;

static void tell(int fd, const struct end *end) {
  struct address address = address_of(end);
  CHECK_EQUAL(write(fd, &address, sizeof address), sizeof address);
}

static struct address hear(int fd) {
  struct address address;
  CHECK_EQUAL(read(fd, &address, sizeof address), sizeof address);
  return address;
}

/* Connects the end to the other process's, and returns when both are connected. */
static struct address meet(int fd, struct end *end) {
  tell(fd, end);
  struct address peer = hear(fd);
  to_rts(end->qp, &peer);
  tell(fd, end);
  return hear(fd);
}

static pid_t start(const char *role, int *fd) {
  int fds[2];
  CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
  fcntl(fds[0], F_SETFD, FD_CLOEXEC);
  pid_t pid = fork();
  if (pid == 0) {
    char number[16];
    snprintf(number, sizeof number, "%d", fds[1]);
    execl(own_path, own_path, role, number, (char *)NULL);
    _exit(127);
  }
  close(fds[1]);
  *fd = fds[0];
  return pid;
}

/* Sends back what it gets, writes it into the peer's memory as well, and says so with immediate data. */
static int echo(int fd, int gid_index) {
  char *memory = malloc(2 * BYTES);
  struct end end = open_end(memory, BYTES, 4 * DEPTH, 1);
  end.gid_index = gid_index;
  CHECK_EQUAL(receive(&end, 0, 0, BYTES / 2), 0);
  struct address peer = meet(fd, &end);
  for (unsigned i = 0; i < SIZES; i++) {
    uint32_t bytes = poll_one(&end, i, IBV_WC_SUCCESS).byte_len;
    CHECK_EQUAL(bytes, sizes[i]);
    CHECK_EQUAL(post(&end, IBV_WR_RDMA_WRITE, 100, bytes, &peer, BYTES / 2), 0);
    poll_one(&end, 100, IBV_WC_SUCCESS);
    CHECK_EQUAL(post(&end, IBV_WR_RDMA_WRITE_WITH_IMM, 101, bytes, &peer, 3 * BYTES / 4), 0);
    poll_one(&end, 101, IBV_WC_SUCCESS);
    if (i + 1 < SIZES) CHECK_EQUAL(receive(&end, i + 1, 0, BYTES / 2), 0);
    CHECK_EQUAL(send_bytes(&end, 102, bytes), 0);
    poll_one(&end, 102, IBV_WC_SUCCESS);
  }
  hear(fd);
  close_end(&end);
  free(memory);
  return 0;
}

static void exchange(int gid_index) {
  int fd;
  pid_t pid = start(gid_index ? "echo by IPv4" : "echo", &fd);
  char *memory = malloc(BYTES), *back = malloc(BYTES);
  struct end end = open_end(memory, BYTES, 4 * DEPTH, 1);
  end.gid_index = gid_index;
  struct ibv_mr *target = ibv_reg_mr(end.pd, back, BYTES, IBV_ACCESS_LOCAL_WRITE);
  CHECK(target);
  meet(fd, &end);
  for (unsigned i = 0; i < SIZES; i++) {
    memset(back, 0x55, BYTES);
    fill(memory, sizes[i], i + 50);
    CHECK_EQUAL(receive_at(&end, 1, back, 4, target->lkey), 0); /* for the immediate data */
    CHECK_EQUAL(receive_at(&end, 2, back + 3, BYTES - 3, target->lkey), 0);
    CHECK_EQUAL(send_bytes(&end, 3, sizes[i]), 0);
    poll_one(&end, 3, IBV_WC_SUCCESS);
    struct ibv_wc wc = poll_one(&end, 1, IBV_WC_SUCCESS);
    CHECK_EQUAL(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
    CHECK_EQUAL(wc.byte_len, sizes[i]);
    verify(memory + BYTES / 2, sizes[i], i + 50);
    verify(memory + 3 * BYTES / 4, sizes[i] < BYTES / 4 ? sizes[i] : BYTES / 4, i + 50);
    CHECK_EQUAL(poll_one(&end, 2, IBV_WC_SUCCESS).byte_len, sizes[i]);
    verify(back + 3, sizes[i], i + 50);
    CHECK(back[0] == 0x55 && back[3 + sizes[i]] == 0x55);
  }
  tell(fd, &end);
  CHECK_EQUAL(check_wait(pid), 0);
  close(fd);
  CHECK_EQUAL(ibv_dereg_mr(target), 0);
  close_end(&end);
  free(memory);
  free(back);
}

static void test_two_processes(void) { exchange(0); }

static void test_two_processes_by_ipv4(void) { exchange(1); }

static int sleep_connected(int fd) {
  char *memory = malloc(BYTES);
  struct end end = open_end(memory, BYTES, 4 * DEPTH, 1);
  meet(fd, &end);
  pause();
  return 0;
}

/* Nothing tells an unreliable connection of it: sends complete, writes too, and nothing arrives. */
static void test_peer_dies(void) {
  int fd;
  pid_t pid = start("sleep", &fd);
  char *memory = malloc(BYTES);
  struct end end = open_end(memory, BYTES, 4 * DEPTH, 1);
  struct address peer = meet(fd, &end);
  CHECK_EQUAL(post(&end, IBV_WR_RDMA_WRITE, 1, 100, &peer, 0), 0);
  poll_one(&end, 1, IBV_WC_SUCCESS);
  CHECK_EQUAL(kill(pid, SIGKILL), 0);
  int status = check_wait(pid);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  CHECK_EQUAL(send_bytes(&end, 2, 100), 0);
  poll_one(&end, 2, IBV_WC_SUCCESS);
  CHECK_EQUAL(post(&end, IBV_WR_RDMA_WRITE, 3, 100, &peer, 0), 0);
  poll_one(&end, 3, IBV_WC_SUCCESS);
  close(fd);
  close_end(&end);
  free(memory);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"TwoProcesses", test_two_processes},
      {"TwoProcessesByIpv4", test_two_processes_by_ipv4},
      {"PeerDies", test_peer_dies},
  };
  own_path = argv[0];
  if (argc == 3 && strcmp(argv[1], "echo") == 0) return echo(atoi(argv[2]), 0);
  if (argc == 3 && strcmp(argv[1], "echo by IPv4") == 0) return echo(atoi(argv[2]), 1);
  if (argc == 3 && strcmp(argv[1], "sleep") == 0) return sleep_connected(atoi(argv[2]));
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
