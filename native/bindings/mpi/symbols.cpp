#include "symbols.h"

#ifdef __linux__

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

/* Every lookup begins with the Bloom filter of the library's hash table; one without a bit says: no such name. */
void mlxdist::hide_symbols() {
  struct Table { /* native/CMakeLists.txt asks for this kind */
    uint32_t buckets, first_symbol, filter_words, shift;
    ElfW(Addr) filter[];
  };
  const ElfW(Dyn)* entry = _DYNAMIC; /* this library's */
  while (entry->d_tag != DT_GNU_HASH && entry->d_tag != DT_NULL) entry++;
  if (entry->d_tag == DT_NULL) return;
  auto* table = reinterpret_cast<Table*>(entry->d_un.d_ptr); /* the loader has made it an address */
  size_t bytes = table->filter_words * sizeof(ElfW(Addr));
  uintptr_t address = reinterpret_cast<uintptr_t>(table->filter);
  uintptr_t page = address & -static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  void* pages = reinterpret_cast<void*>(page);
  if (mprotect(pages, address + bytes - page, PROT_READ | PROT_WRITE) != 0) return; /* it is as before, then */
  memset(table->filter, 0, bytes);
  mprotect(pages, address + bytes - page, PROT_READ);
}

#else

void mlxdist::hide_symbols() {}

#endif
