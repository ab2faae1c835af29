/* Messages gathered from several pieces of memory, above all a header of ours and a payload of the user's. */
#include "check.h"
#include "soft_side.h"

#include <errno.h>

/* Four pieces, one of them empty, from two regions, one of which is ordinary memory. */
static void test_four_pieces(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  static char elsewhere[100];
  struct ibv_mr *mr = verbs_soft()->reg_mr(a.pd, elsewhere, sizeof elsewhere, 0);
  char expected[200];
  side_fill(expected, 200, 3);
  memcpy(a.memory + 10, expected, 60);
  memcpy(elsewhere, expected + 60, 100);
  memcpy(a.memory + 1000, expected + 160, 40);
  struct ibv_sge list[4] = {{(uintptr_t)a.memory + 10, 60, a.mr->lkey},
                            {(uintptr_t)elsewhere, 100, mr->lkey},
                            {0, 0, 0},
                            {(uintptr_t)a.memory + 1000, 40, a.mr->lkey}};
  struct ibv_send_wr wr = {.sg_list = list, .num_sge = 4, .opcode = IBV_WR_SEND}, *bad;
  CHECK_EQUAL(side_receive(&b, 1, 0, 200), 0);
  CHECK_EQUAL(ibv_post_send(a.qp, &wr, &bad), 0);
  CHECK_EQUAL(side_poll_one(&b, 1, IBV_WC_SUCCESS).byte_len, 200);
  side_verify(b.memory, 200, 3);
  CHECK_EQUAL(verbs_soft()->dereg_mr(mr), 0);
  side_close_pair(&a, &b);
}

/* A header from the slab and the payload from where the user has it: any address, any length, registered for this
 * one message. Each byte is copied once, straight to its place behind the header. */
static void check_from_user(struct side *a, struct side *b, size_t length, size_t misalignment, unsigned seed) {
  const size_t header = 64, message = header + length;
  char *user = malloc(misalignment + length), *expected = malloc(message);
  CHECK(user && expected);
  side_fill(expected, message, seed);
  memcpy(a->memory, expected, header);
  memcpy(user + misalignment, expected + header, length);
  memset(b->memory, 0x11, message + 64);

  struct ibv_mr *mr = verbs_soft()->reg_mr(a->pd, user + misalignment, length, 0);
  CHECK(mr, "reg_mr: %s", strerror(errno));
  struct ibv_sge list[2] = {{(uintptr_t)a->memory, header, a->mr->lkey},
                            {(uintptr_t)user + misalignment, (uint32_t)length, mr->lkey}};
  struct ibv_send_wr wr = {
      .wr_id = 1, .sg_list = list, .num_sge = 2, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
  struct ibv_send_wr *bad;
  CHECK_EQUAL(side_receive(b, 2, 0, message + 32), 0);
  CHECK_EQUAL(ibv_post_send(a->qp, &wr, &bad), 0);
  side_poll_one(a, 1, IBV_WC_SUCCESS);
  CHECK_EQUAL(verbs_soft()->dereg_mr(mr), 0);
  memset(user + misalignment, 0x33, length); /* completed: the user's again */
  CHECK_EQUAL(side_poll_one(b, 2, IBV_WC_SUCCESS).byte_len, message);
  CHECK(memcmp(b->memory, expected, message) == 0, "%zu bytes at %zu", length, misalignment);
  for (size_t i = 0; i < 64; i++) CHECK_EQUAL(b->memory[message + i], 0x11);
  free(user);
  free(expected);
}

static void test_from_user_memory(void) {
  static const size_t lengths[] = {1, 3, 63, 4095, 4097, 65537, 500001};
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  uint64_t bytes = 0;
  for (unsigned i = 0; i < 7; i++)
    for (size_t misalignment = 0; misalignment < 20; misalignment += 3) {
      check_from_user(&a, &b, lengths[i], misalignment, i);
      bytes += 64 + lengths[i];
    }
  CHECK_EQUAL(side_counters(&a).bytes_sent, bytes);
  side_close_pair(&a, &b);
}

/* One byte beyond what was registered, or a key that is no longer valid, and nothing of the message leaves. */
static void test_beyond_user_memory(void) {
  static char user[101];
  struct side a, b;
  for (int stale = 0; stale < 2; stale++) {
    side_open_pair(&a, &b, SIDE_DEFAULTS);
    struct ibv_mr *mr = verbs_soft()->reg_mr(a.pd, user, 100, 0);
    struct ibv_sge list[2] = {{(uintptr_t)a.memory, 64, a.mr->lkey}, {(uintptr_t)user, stale ? 100 : 101, mr->lkey}};
    struct ibv_send_wr wr = {.wr_id = 1, .sg_list = list, .num_sge = 2, .opcode = IBV_WR_SEND}, *bad;
    if (stale) CHECK_EQUAL(verbs_soft()->dereg_mr(mr), 0);
    if (stale) mr = verbs_soft()->reg_mr(a.pd, user, 100, 0);
    memset(b.memory, 0x11, 256);
    CHECK_EQUAL(side_receive(&b, 2, 0, 256), 0);
    CHECK_EQUAL(ibv_post_send(a.qp, &wr, &bad), 0);
    side_poll_one(&a, 1, IBV_WC_LOC_PROT_ERR);
    struct ibv_wc wc;
    CHECK_EQUAL(ibv_poll_cq(b.cq, 1, &wc), 0);
    for (size_t i = 0; i < 256; i++) CHECK_EQUAL(b.memory[i], 0x11);
    CHECK_EQUAL(verbs_soft()->dereg_mr(mr), 0);
    side_close_pair(&a, &b);
  }
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"FourPieces", test_four_pieces},
      {"FromUserMemory", test_from_user_memory},
      {"BeyondUserMemory", test_beyond_user_memory},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
