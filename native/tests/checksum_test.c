/* CRC32C by the processor's instruction and by table, which a processor that has the instruction never uses. */
#include "../transport/checksum.c"

#include <stdio.h>
#include <stdlib.h>

#define REQUIRE(condition)                                                                                             \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition);                                         \
      return 1;                                                                                                        \
    }                                                                                                                  \
  } while (0)

int main(void) {
  static char bytes[3000];
  for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (char)(i * 7 + i / 251);
  REQUIRE(checksum(0, "123456789", 9) == 0xe3069283); /* the check value of its definition */
  REQUIRE(checksum(0, "", 0) == 0);
  REQUIRE(~by_table(~0u, "123456789", 9) == 0xe3069283);
  for (uint64_t begin = 0; begin < 9; begin++)
    for (uint64_t length = 0; begin + length <= sizeof bytes; length += 1 + length / 9) {
      uint32_t whole = checksum(0, bytes + begin, length);
      REQUIRE(whole == (uint32_t)~by_table(~0u, bytes + begin, length));
      for (uint64_t part = 0; part <= length; part += 1 + length / 5)
        REQUIRE(checksum(checksum(0, bytes + begin, part), bytes + begin + part, length - part) == whole);
    }
  printf("checksum_test passed\n");
  return 0;
}
