// The bytes behind a pool's frames, and beside them (int8) pages that are not full yet.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention.h"
#include "memory.h"

namespace kvpager {

// int8 pages have scales over all of their tokens, so a page is coded when it is full. Until then it is held in
// float32 in a staging slot. The slot stays when the page fills, for a rollback may open the page again, until
// `finish`, or until another page takes the frame.
class Frames {
 public:
  // Throws std::invalid_argument for sizes that kernels don't serve, std::bad_alloc.
  Frames(int64_t count, const std::string& dtype, int64_t page_size, int64_t head_dim);

  const Layout& layout() const { return layout_; }
  int64_t count() const { return count_; }
  FrameView view();
  int64_t nbytes() const;

  // The slots of pages [n] that tokens from `offset` on are about to be written to; takes and fills them as needed.
  void slots_to_write(const int64_t* frames, int64_t pages, int64_t offset, int64_t tokens, int64_t* slots);
  // The slots of pages that hold `counts` tokens (null: that are full), -1 where the frame itself is to be read.
  void slots_to_read(const int64_t* frames, const int64_t* counts, int64_t pages, int64_t* slots) const;
  void copy_slots(const int64_t* from, const int64_t* to, int64_t pages);
  void finish(const int64_t* frames, int64_t pages);
  // Which pages are held in a staging slot.
  void held(const int64_t* frames, int64_t pages, uint8_t* held) const;
  // What pages hold of one token each: its keys [D], then its values [D], int8 as float32.
  int64_t token_bytes() const;
  void tokens(const int64_t* frames, const int64_t* offsets, int64_t pages, uint8_t* out);

 private:
  bool coded() const { return layout_.dtype == DType::int8; }
  int64_t slot_floats() const { return int64_t{2} * layout_.page_size * layout_.head_dim; }
  int32_t take(int64_t frame);

  static constexpr int64_t kSlab = kStagingSlab;

  int64_t count_;
  Layout layout_;
  std::unique_ptr<Region> region_;
  std::vector<int32_t> staged_;  // by frame
  std::vector<int32_t> free_;
  std::vector<std::unique_ptr<float[]>> owned_;
  std::vector<float*> slabs_;  // as many as there could ever be, so that kernels can keep the address
};

}  // namespace kvpager
