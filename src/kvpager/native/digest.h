// Digests of pages: keys in 2 bits, from which the pages that a tile attends to are chosen.
//
// A layer's digests lie by row (block row of the page table), then KV head, in four arrays:
//
//   codes    [rows][H][P/B][ceil(D/16)][B][4]  byte c of lane t of group j holds the 2-bit codes of token t, channels
//                                              16 j + c, + 4, + 8 and + 12, lowest bits first. Where D leaves 8 channels
//                                              over, half a group: its lanes t < B/2 hold the codes of tokens t in
//                                              their lower and of tokens t + B/2 in their upper four bits
//   steps    uint8 [rows][H][D]
//   offsets  int8  [rows][H][D]
//   scales   float [rows][H][2]                of the offsets, and of the steps
//
// P is the page size (8, 16 or 32), D the head dimension (a multiple of 8 up to 256), B = min(P, 16). A key's channel is
// held as offset * scale[0] + step * scale[1] * code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"

namespace kvpager {

struct DigestShape {
  int heads, page_size, head_dim;

  size_t code_bytes() const { return static_cast<size_t>(page_size) * head_dim / 4; }  // of one page
  size_t page_bytes() const { return code_bytes() + 2 * static_cast<size_t>(head_dim) + 2 * sizeof(float); }
};

struct DigestLayer {
  uint8_t* codes;
  uint8_t* steps;
  int8_t* offsets;
  float* scales;
};

// One choice. Queries of a KV head and its group are "looks": G heads x every `sample`-th position of the tile.
struct DigestChoice {
  DigestShape shape;
  DigestLayer layer;
  const int64_t* rows;  // [pages], checked
  const int64_t* starts;  // [pages]
  int64_t pages;
  const float* queries;  // [H * G][T][D] by strides, in floats; channels lie together
  int64_t head_stride, token_stride;
  const float* own_lse;  // [H * G][T]
  int group;
  int64_t tokens, start, sample;
  float scale, softcap;  // no cap: 0
  int64_t window;        // none: 0
  int64_t sinks, recent;  // protected pages at either end of the candidates, together at most `pages`
  int64_t room;           // pages a KV head, on average
  void* scratch;          // digest_scratch(...) bytes, aligned to 64
  uint8_t* chosen;        // [H][pages]
  float* ratio;           // [H][pages]
  float missed;           // out
};

// Position of the i-th look of query head g of a group, counted from the tile's end: see kvpager.core.digest.looks.
struct Looks {
  int64_t tokens, sample;
  int group;

  int64_t back(int g) const {
    const int64_t shift = sample * g / group;
    return shift < tokens ? shift : tokens - 1;
  }
  int64_t count(int g) const { return (tokens - back(g) - 1) / sample + 1; }
  int64_t total() const {
    int64_t sum = 0;
    for (int g = 0; g < group; ++g) sum += count(g);
    return sum;
  }
};

struct DigestTable {
  // keys [pages][H][P][D] into the rows' digests
  void (*build)(const DigestShape&, const DigestLayer&, const int64_t* rows, const float* keys, int64_t pages);
  void (*choose)(DigestChoice&);
  // bytes of scratch that a choice among so many pages by so many looks needs
  size_t (*scratch)(const DigestShape&, int64_t pages, int64_t looks);
};

KV_DECLARE_TABLE(DigestTable, digest)

}  // namespace kvpager
