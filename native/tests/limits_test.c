/* The transfer from core to core that benchmarks compare with: what was sent is there, and a thread is as it was. */
#define _GNU_SOURCE 1 /* sched_getaffinity */
#include "check.h"
#include "mlxdist.h"

#include <sched.h>
#include <stdint.h>

enum { COUNT = 5 };

static mlxdist_core_transfer transfer_of(uint64_t bytes) {
  mlxdist_core_transfer transfer = {.bytes = bytes, .count = COUNT, .cores = {-1, -1}, .shared = calloc(1, bytes)};
  for (int side = 0; side < 2; side++) {
    char *sent = malloc(bytes);
    CHECK(sent);
    for (uint64_t i = 0; i < bytes; i++) sent[i] = (char)(i % 251 + i / 251 * 7 + (uint64_t)side + 1);
    transfer.sent[side] = sent;
    transfer.received[side] = calloc(1, bytes);
    CHECK(transfer.received[side] && transfer.shared);
  }
  return transfer;
}

static void transfer_free(mlxdist_core_transfer *transfer) {
  free(transfer->shared);
  for (int side = 0; side < 2; side++) {
    free((void *)transfer->sent[side]);
    free(transfer->received[side]);
  }
}

static void check_received(const mlxdist_core_transfer *transfer) {
  for (int side = 0; side < 2; side++)
    CHECK(memcmp(transfer->received[side], transfer->sent[1 - side], transfer->bytes) == 0, "side %d", side);
}

static void test_each_side_has_what_the_other_sent(void) {
  const uint64_t sizes[] = {1, 63, 8 << 10, (1 << 20) + 3};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    mlxdist_core_transfer transfer = transfer_of(sizes[i]);
    double times[COUNT + 1] = {[COUNT] = -1};
    CHECK_EQUAL(mlxdist_time_core_transfers(&transfer, times), MLXDIST_OK);
    check_received(&transfer);
    for (int call = 0; call < COUNT; call++) CHECK(times[call] > 0, "%g", times[call]);
    CHECK(times[COUNT] == -1, "more than count");
    transfer_free(&transfer);
  }
}

/* Without others before it that leave the same bytes. */
static void test_a_single_round_trip(void) {
  for (int turn = 0; turn < 8; turn++) {
    mlxdist_core_transfer transfer = transfer_of(256 << 10);
    transfer.count = 0;
    CHECK_EQUAL(mlxdist_time_core_transfers(&transfer, NULL), MLXDIST_OK);
    check_received(&transfer);
    transfer_free(&transfer);
  }
}

#ifdef __linux__
static cpu_set_t own_cores(void) {
  cpu_set_t cores;
  CHECK(sched_getaffinity(0, sizeof cores, &cores) == 0);
  return cores;
}

static int32_t first_core(const cpu_set_t *cores) {
  int32_t core = 0;
  while (!CPU_ISSET(core, cores)) core++;
  return core;
}

static void test_the_caller_has_its_cores_again(void) {
  cpu_set_t before = own_cores();
  mlxdist_core_transfer transfer = transfer_of(64);
  double times[COUNT];
  transfer.cores[0] = first_core(&before);
  CHECK_EQUAL(mlxdist_time_core_transfers(&transfer, times), MLXDIST_OK);
  cpu_set_t after = own_cores();
  CHECK(CPU_EQUAL(&before, &after));
  transfer_free(&transfer);
}

/* Where two threads that poll share a core, each turn takes milliseconds: this number would end no test. */
static void test_a_side_that_is_kept_nowhere_does_not_share_the_core(void) {
  enum { MANY = 100000 };
  cpu_set_t before = own_cores();
  if (CPU_COUNT(&before) < 2) return;
  mlxdist_core_transfer transfer = transfer_of(64);
  double *times = calloc(MANY, sizeof *times);
  transfer.count = MANY;
  transfer.cores[0] = first_core(&before);
  CHECK_EQUAL(mlxdist_time_core_transfers(&transfer, times), MLXDIST_OK);
  free(times);
  transfer_free(&transfer);
}

static void test_a_core_that_is_not_there(void) {
  for (int side = 0; side < 2; side++) {
    cpu_set_t before = own_cores();
    mlxdist_core_transfer transfer = transfer_of(64);
    double times[COUNT];
    transfer.cores[side] = CPU_SETSIZE - 1;
    CHECK_EQUAL(mlxdist_time_core_transfers(&transfer, times), MLXDIST_RESOURCES);
    CHECK(strstr(mlxdist_last_error(), "run on core 1023: Invalid argument"), "%s", mlxdist_last_error());
    cpu_set_t after = own_cores();
    CHECK(CPU_EQUAL(&before, &after));
    transfer_free(&transfer);
  }
}
#endif

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"EachSideHasWhatTheOtherSent", test_each_side_has_what_the_other_sent},
      {"ASingleRoundTrip", test_a_single_round_trip},
#ifdef __linux__
      {"TheCallerHasItsCoresAgain", test_the_caller_has_its_cores_again},
      {"ASideThatIsKeptNowhereDoesNotShareTheCore", test_a_side_that_is_kept_nowhere_does_not_share_the_core},
      {"ACoreThatIsNotThere", test_a_core_that_is_not_there},
#endif
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
