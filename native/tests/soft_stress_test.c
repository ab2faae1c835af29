/* Many messages over the software provider: between two processes, and between two threads, where the thread
 * sanitizer sees both sides of the shared memory. Takes the number of messages from MESSAGES. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"
#include "soft_stream.h"

#include <pthread.h>
#include <sched.h>
#include <sys/socket.h>
#include <time.h>

static void run_side(int fd) {
  struct side side;
  side_open(&side, STREAM_OPTIONS);
  side_to_rts(side.qp, stream_exchange(fd, &side));
  stream_prepare(&side);
  stream_exchange(fd, &side); /* a barrier: the peer's receives are posted */
  stream_run(&side, stream_messages(100000));
  side_close(&side);
}

static void test_two_processes(void) { stream_in_two_processes(run_side); }

static void test_two_threads(void) { stream_in_two_threads(run_side); }

/* One side is reset and connected again and again while the other sends: nothing is torn, nothing is stale. */
struct sender {
  struct side side;
  _Atomic int stop;
};

static void *send_until_stopped(void *argument) {
  struct sender *sender = argument;
  for (uint64_t n = 0; !sender->stop; n++) {
    memset(sender->side.memory, (int)(n & 0x7f), 4096);
    CHECK_EQUAL(side_send(&sender->side, n, 0, 4096, IBV_SEND_SIGNALED), 0);
    struct ibv_wc wc;
    CHECK_EQUAL(ibv_poll_cq(sender->side.cq, 1, &wc), 1);
    CHECK_EQUAL(wc.status, IBV_WC_SUCCESS);
  }
  return NULL;
}

static int take_some(struct side *side) {
  struct ibv_wc wc[8];
  int count = ibv_poll_cq(side->cq, 8, wc);
  for (int i = 0; i < count; i++) {
    CHECK(wc[i].status == IBV_WC_SUCCESS);
    const char *data = side->memory + wc[i].wr_id * 4096;
    for (int b = 0; b < 4096; b++) CHECK(data[b] == data[0], "torn at byte %d", b);
  }
  return count;
}

static void test_reset_under_fire(void) {
  static struct sender sender;
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  side_open(&sender.side, SIDE_DEFAULTS);
  side_to_rts(sender.side.qp, side_address(&side));
  struct side_address peer = side_address(&sender.side);
  pthread_t thread;
  CHECK_EQUAL(pthread_create(&thread, NULL, send_until_stopped, &sender), 0);
  time_t end = time(NULL) + CHECK_SECONDS / 12; /* on busy cores a round takes several time slices */
  for (int round = 0; round < 20 || (round < 2000 && time(NULL) < end); round++) {
    side_to_rts(side.qp, peer);
    for (uint64_t i = 0; i < 8; i++) CHECK_EQUAL(side_receive(&side, i, i * 4096, 4096), 0);
    for (int received = 0; received < round % 8;) {
      int count = take_some(&side);
      if (count == 0) sched_yield();
      received += count;
    }
    CHECK_EQUAL(side_modify(side.qp, IBV_QPS_RESET, peer), 0);
    memset(side.memory, 0x55, 8 * 4096); /* ours again: no peer writes here now */
    for (int i = 0; i < 8 * 4096; i++) CHECK(side.memory[i] == 0x55, "written after RESET");
  }
  sender.stop = 1;
  CHECK_EQUAL(pthread_join(thread, NULL), 0);
  side_close(&sender.side);
  side_close(&side);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"TwoProcesses", test_two_processes},
      {"TwoThreads", test_two_threads},
      {"ResetUnderFire", test_reset_under_fire},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
