/*
 * Fuzzes what the engine gets as text or tables: lists of faults, and tuning tables with the layouts they are asked
 * about. The first byte of an input says which; the second one is the operation.
 */
#include "pair.h"

static void fuzz_faults(mlxdist_group *group, const char *text) {
  int status = mlxdist_group_inject_faults(group, text);
  REQUIRE(status == MLXDIST_OK || mlxdist_last_error()[0]);
  REQUIRE(mlxdist_group_inject_faults(group, "none") == MLXDIST_OK);
}

static void fuzz_tuning(mlxdist_group *group, uint8_t operation, const uint8_t *bytes, size_t size) {
  mlxdist_tuning table[8] = {0};
  mlxdist_layout layout = {0};
  uint64_t lines = size / sizeof *table < 8 ? size / sizeof *table : 8;
  if (lines) memcpy(table, bytes, lines * sizeof *table);
  size_t rest = size - lines * sizeof *table;
  if (rest) memcpy(&layout, bytes + lines * sizeof *table, rest < sizeof layout ? rest : sizeof layout);
  REQUIRE(mlxdist_group_set_tuning(group, table, lines) == MLXDIST_OK);
  int32_t algorithm = mlxdist_group_algorithm(group, (int8_t)operation, &layout);
  REQUIRE(algorithm >= MLXDIST_AUTO && algorithm <= MLXDIST_HIERARCHICAL);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
  static struct pair pair;
  if (!pair.group[0]) pair_open(&pair, 0);
  if (size < 2) return 0;
  if (bytes[0] & 1) {
    fuzz_tuning(pair.group[0], bytes[1], bytes + 2, size - 2);
    return 0;
  }
  char text[256];
  size_t length = size - 1 < sizeof text ? size - 1 : sizeof text - 1;
  memcpy(text, bytes + 1, length);
  text[length] = 0;
  fuzz_faults(pair.group[0], text);
  return 0;
}
