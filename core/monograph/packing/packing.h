// Packs documents into rows of a fixed number of tokens. Knows lengths only, no tokens. Every
// result is a function of the arguments alone: ties are broken by order, never by chance.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace monograph {

// Best fit keeps two 4-byte entries for each possible space of a row: 128 MiB at this limit.
inline constexpr std::int64_t kLargestCapacity = std::int64_t{1} << 24;
inline constexpr std::int64_t kAnyNumber = std::numeric_limits<std::int64_t>::max();

// The numbers travel in graphs and are never reused.
enum class PackStrategy : std::uint8_t {
  // Longest document first (equal ones in their order), each into the row with the least space that
  // takes it; among rows of equal space, the one that has had that space for longest.
  kBestFitDecreasing = 0,
  // Documents in their order, each into the row opened first that still takes it.
  kFirstFit = 1,
};

// What becomes of a document longer than a row. Numbers as above.
enum class Overlong : std::uint8_t {
  kTruncate = 0,  // its first `capacity` tokens are kept
  kSplit = 1,     // pieces of `capacity` tokens and a rest, each packed by itself
  kRefuse = 2,    // an Error that names the document
};

struct PackOptions {
  std::int64_t capacity = 0;                // tokens of a row, 1 to kLargestCapacity
  std::int64_t max_documents = kAnyNumber;  // pieces of a row, at least 1
  PackStrategy strategy = PackStrategy::kBestFitDecreasing;
  Overlong overlong = Overlong::kRefuse;
};

// Rows in the order in which they were opened, pieces of a row in the order in which they were
// placed: row i holds pieces row_offsets[i] to row_offsets[i + 1]. Piece p is the part of document
// documents[p] from token starts[p] (0 where starts is empty) of min(capacity, what is left)
// tokens.
struct Packing {
  std::vector<std::int64_t> documents;    // [pieces]
  std::vector<std::int64_t> starts;       // [pieces] with kSplit, else empty
  std::vector<std::int64_t> row_offsets;  // [rows + 1]
};

// A document without tokens has no piece; every other one has exactly one, or with kSplit
// ceil(length / capacity). Throws Error for a negative length, an overlong document that is to be
// refused or that splits into more than 2^24 pieces, and 2^32 or more documents or pieces.
Packing pack(std::span<const std::int64_t> lengths, const PackOptions& options);

// A row that still takes documents.
struct OpenRow {
  std::int64_t row;        // its number, in the order of opening
  std::int64_t space;      // tokens left, at least 1
  std::int64_t documents;  // in it so far
};

// Packing of an endless stream: what is known between two calls, and all of it.
struct PackStream {
  std::int64_t capacity = 0;                // 1 to kLargestCapacity
  std::int64_t max_documents = kAnyNumber;  // of a row, at least 1
  std::int64_t max_open = 1;                // rows open at once, at least 1
  std::int64_t next_row = 0;                // the number the next row gets
  std::vector<OpenRow> open;                // oldest first, at most max_open
};

// Places a document of 1 to capacity tokens: into the open row with the least space that takes it,
// the oldest of equals. If none does, a row is opened; if max_open are open already, the one with
// the least space is closed first, the oldest of equals. A row without space, or with
// max_documents, is closed at once. Appends the numbers of rows it closed to `closed`; returns the
// row of the document. One pass over the open rows.
std::int64_t place(PackStream& stream, std::int64_t length, std::vector<std::int64_t>& closed);

}  // namespace monograph
