// Adafactor over a unit's parameters, stacks of matrices: three passes over gradients, the last over masters too, C ABI.
//
// What for: what a row and a column of squared gradients sum up must be known before the first element is updated, and the mean
// square of the whole update before it is applied. So it cannot be a rule of `formats.cpp`, and in torch every pass makes
// temporaries of several times its gradient. Here a row stays in the cache between its load and its sums; 14 bytes a parameter are
// moved. `layerferry/optim/reference_factored.py` is the same in torch, operation by operation; `tests/optim/test_adafactor.py`
// holds the two to the same bits, for every clone.
//
// Sums go over tiles of fixed sizes, each a tree by halving that zeros fill up, and tiles are added in their order: one order for
// every vector width, every number of threads, and a GPU. Sums by row run along the row. Sums by column run over the rows of a
// tile, and are walked depth first, so that each row is read once and log2(rows) rows of sums are held.
//
// Threads share out the pieces of all parameters, so each pass over a unit is one parallel region, and small matrices keep
// every core busy too: whichever thread is free takes the next piece; none waits for another before the end, which costs most
// where other programs have the cores. Left out: prefetches (long rows, which the processor asks for itself).

#include <algorithm>
#include <vector>

#include "masters.h"

// Mirrors _Factored in layerferry/optim/native_factored.py.
struct Factored {
    void *weight;
    void *residue;
    const void *grad;
    float *rows;     // [matrices * height] second moments; of a vector, which is one row, [width]
    float *columns;  // [matrices * width]; of a vector null
    int64_t matrices;
    int64_t height;
    int64_t width;
    int64_t start;       // place of the first element in its section, whole blocks: what the random numbers are counted by
    int32_t master;
    int32_t grad_is_fp32;
    float decay;
};

// Mirrors _Scalars there.
struct Scalars {
    float lr;
    float beta2;
    float one_minus_beta2;
    float eps;
    float clip_threshold;
    float grad_scale;
    uint32_t key_low;
    uint32_t key_high;
};

namespace {

// Mirrors layerferry/optim/factored.py.
constexpr int64_t kTileColumns = 128, kTileRows = 256, kTileNumbers = 1024;

// The sum of a tile, which is overwritten.
template <int64_t kCount>
INLINE float tree(float *__restrict__ values) {
    if constexpr (kCount > 1) {
        for (int64_t i = 0; i < kCount / 2; ++i) values[i] = values[i] + values[i + kCount / 2];
        return tree<kCount / 2>(values);
    }
    return values[0];
}

CLONES float sum_of(const float *values, int64_t count) {
    float sum = 0.0f;
    for (int64_t at = 0; at < count; at += kTileNumbers) {
        alignas(64) float tile[kTileNumbers] = {};
        std::copy(values + at, values + std::min(at + kTileNumbers, count), tile);
        sum = sum + tree<kTileNumbers>(tile);
    }
    return sum;
}

template <typename Element>
INLINE float squared(Element grad, float grad_scale, float eps) {
    const float scaled = widen(grad) * grad_scale;
    return scaled * scaled + eps;
}

// ---- sums of the squared gradient

// The sum of `width` numbers, of which `fill(at, count, tile)` gives some. `count` is a constant where a tile is full.
template <typename Fill>
INLINE float sum_by_tiles(int64_t width, const Fill &fill) {
    float sum = 0.0f;
    alignas(64) float tile[kTileColumns];
    int64_t at = 0;
    for (; at + kTileColumns <= width; at += kTileColumns) {
        fill(at, kTileColumns, tile);
        sum = sum + tree<kTileColumns>(tile);
    }
    if (at < width) {
        for (int64_t i = 0; i < kTileColumns; ++i) tile[i] = 0.0f;
        fill(at, width - at, tile);
        sum = sum + tree<kTileColumns>(tile);
    }
    return sum;
}

// Of one row: the squares themselves, and their sum.
template <typename Element>
INLINE float squares_of_row(const Element *__restrict__ row, int64_t width, float grad_scale, float eps,
                            float *__restrict__ squares) {
    return sum_by_tiles(width, [=](int64_t at, int64_t count, float *__restrict__ tile) INLINE_CALL {
        for (int64_t i = 0; i < count; ++i) tile[i] = squares[at + i] = squared(row[at + i], grad_scale, eps);
    });
}

// Of two rows that are neighbours in the tree: their squares summed by column, and the sum of each row.
template <typename Element>
INLINE void squares_of_pair(const Element *__restrict__ one, const Element *__restrict__ other, int64_t width, float grad_scale,
                            float eps, float *__restrict__ columns, float &sum_of_one, float &sum_of_other) {
    float second = 0.0f;
    const float first = sum_by_tiles(width, [&](int64_t at, int64_t count, float *__restrict__ tile) INLINE_CALL {
        alignas(64) float other_tile[kTileColumns] = {};
        for (int64_t i = 0; i < count; ++i) {
            tile[i] = squared(one[at + i], grad_scale, eps);
            other_tile[i] = squared(other[at + i], grad_scale, eps);
            columns[at + i] = tile[i] + other_tile[i];
        }
        second = second + tree<kTileColumns>(other_tile);
    });
    sum_of_one = first;
    sum_of_other = second;
}

CLONES void one_row(const Factored &f, const Scalars &s, int64_t row, float *columns, float *by_row) {
    const int64_t at = row * f.width;
    by_row[row] = f.grad_is_fp32
                      ? squares_of_row(static_cast<const float *>(f.grad) + at, f.width, s.grad_scale, s.eps, columns)
                      : squares_of_row(static_cast<const uint16_t *>(f.grad) + at, f.width, s.grad_scale, s.eps, columns);
}

CLONES void two_rows(const Factored &f, const Scalars &s, int64_t one, int64_t other, float *columns, float *by_row) {
    const int64_t width = f.width;
    if (f.grad_is_fp32) {
        const float *grad = static_cast<const float *>(f.grad);
        squares_of_pair(grad + one * width, grad + other * width, width, s.grad_scale, s.eps, columns, by_row[one], by_row[other]);
    } else {
        const uint16_t *grad = static_cast<const uint16_t *>(f.grad);
        squares_of_pair(grad + one * width, grad + other * width, width, s.grad_scale, s.eps, columns, by_row[one], by_row[other]);
    }
}

CLONES void add_range(float *__restrict__ sums, const float *__restrict__ values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) sums[i] = sums[i] + values[i];
}

// The tree of a tile's rows. A thread has one, for all of its tiles.
class Columns {
  public:
    // Sums by column of `count` rows from `row` on; those by row go where they belong.
    void of(const Factored &f, const Scalars &s, int64_t row, int64_t count, float *by_row, float *into) {
        f_ = &f;
        s_ = &s;
        by_row_ = by_row;
        row_ = row;
        count_ = count;
        const size_t needed = static_cast<size_t>(kLevels * f.width);
        if (sums_.size() < needed) sums_.resize(needed);
        node(0, 0, into);
    }

  private:
    // A level has half as many elements as the one before, from one on; element `index` is the sum of `index` and
    // `index` + their number on the next. Rows that are not there are zeros, which nobody adds.
    void node(int64_t level, int64_t index, float *into) {
        const int64_t other = index + (int64_t{1} << level);
        if (level == kLevels) {
            one_row(*f_, *s_, row_ + index, into, by_row_);
        } else if (other >= count_) {
            node(level + 1, index, into);
        } else if (level == kLevels - 1) {
            two_rows(*f_, *s_, row_ + index, row_ + other, into, by_row_);
        } else {
            float *below = sums_.data() + level * f_->width;
            node(level + 1, index, into);
            node(level + 1, other, below);
            add_range(into, below, f_->width);
        }
    }

    static constexpr int64_t kLevels = 8;
    static_assert(int64_t{1} << kLevels == kTileRows);
    const Factored *f_ = nullptr;
    const Scalars *s_ = nullptr;
    float *by_row_ = nullptr;
    int64_t row_ = 0, count_ = 0;
    std::vector<float> sums_;
};

// ---- moments and factors, a number for each row and column

CLONES void decayed(float *__restrict__ moments, const float *__restrict__ sums, int64_t count, float divisor, const Scalars &s) {
    for (int64_t i = 0; i < count; ++i) moments[i] = moments[i] * s.beta2 + sums[i] / divisor * s.one_minus_beta2;
}

CLONES void inverse_roots(const float *__restrict__ moments, int64_t count, float divisor, float *__restrict__ factors) {
    for (int64_t i = 0; i < count; ++i) factors[i] = 1.0f / std::sqrt(moments[i] / divisor);
}

// What the passes leave of one parameter.
struct Held {
    std::vector<float> by_row;     // [matrices * height] sums of squares; then those of the update
    std::vector<float> by_column;  // [matrices * width]
    std::vector<float> row_factors, column_factors;
    float factor = 0.0f;
};

// Takes the sums into the moments.
void take(const Factored &f, const Scalars &s, Held &held) {
    const int64_t rows = f.matrices * f.height;
    held.row_factors.assign(static_cast<size_t>(rows), 1.0f);
    held.column_factors.resize(held.by_column.size());
    if (!f.columns) {  // of one row: the squares themselves
        decayed(f.rows, held.by_column.data(), f.width, 1.0f, s);
        inverse_roots(f.rows, f.width, 1.0f, held.column_factors.data());
        return;
    }
    decayed(f.rows, held.by_row.data(), rows, static_cast<float>(f.width), s);
    decayed(f.columns, held.by_column.data(), f.matrices * f.width, static_cast<float>(f.height), s);
    for (int64_t row = 0; row < rows; row += f.height) {
        const float mean = sum_of(f.rows + row, f.height) / static_cast<float>(f.height);
        inverse_roots(f.rows + row, f.height, mean, held.row_factors.data() + row);
    }
    inverse_roots(f.columns, f.matrices * f.width, 1.0f, held.column_factors.data());
}

// What the update is multiplied with: the learning rate, less where its root mean square is beyond the threshold.
float clipped(const Factored &f, const Scalars &s, float square) {
    const float size = std::sqrt(square / static_cast<float>(f.matrices * f.height * f.width)) / s.clip_threshold;
    return 1.0f / (size < 1.0f ? 1.0f : size) * s.lr;
}

// ---- the update

template <typename Element>
INLINE float updated(Element grad, float grad_scale, float row_factor, float column_factor) {
    return row_factor * column_factor * (widen(grad) * grad_scale);
}

template <typename Element>
INLINE float square_of_row(const Element *__restrict__ row, int64_t width, float grad_scale, float row_factor,
                           const float *__restrict__ column_factors) {
    return sum_by_tiles(width, [=](int64_t at, int64_t count, float *__restrict__ tile) INLINE_CALL {
        for (int64_t i = 0; i < count; ++i) {
            const float step = updated(row[at + i], grad_scale, row_factor, column_factors[at + i]);
            tile[i] = step * step;
        }
    });
}

CLONES void square_range(const Factored &f, const Scalars &s, int64_t from, int64_t to, Held &held) {
    for (int64_t row = from; row < to; ++row) {
        const float *columns = held.column_factors.data() + row / f.height * f.width;
        const float by = held.row_factors[static_cast<size_t>(row)];
        const int64_t at = row * f.width;
        held.by_row[static_cast<size_t>(row)] =
            f.grad_is_fp32 ? square_of_row(static_cast<const float *>(f.grad) + at, f.width, s.grad_scale, by, columns)
                           : square_of_row(static_cast<const uint16_t *>(f.grad) + at, f.width, s.grad_scale, by, columns);
    }
}

struct alignas(64) Segment {
    float master[kBlock], grad[kBlock];
    uint32_t random[kBlock];
};

// `count` elements of one row and one block of random numbers, of which `lane` is the first one's.
INLINE void subtract_segment(const Factored &f, float grad_scale, const MasterPlanes &planes, Segment &s, int64_t at, int64_t count,
                             int64_t lane, float row_factor, const float *__restrict__ column_factors, float factor, float decay) {
    load_master(planes, at, count, s.master);
    load_grad(f.grad, f.grad_is_fp32, at, count, s.grad);
    for (int64_t i = 0; i < count; ++i) {
        const float step = updated(s.grad[i], grad_scale, row_factor, column_factors[i]) * factor;
        s.master[i] = s.master[i] - (step + s.master[i] * decay);
    }
    store_master(planes, at, count, s.master, s.random + lane);
}

CLONES void subtract_range(const Factored &f, const Scalars &s, int64_t from, int64_t to, const Held &held) {
    Segment segment;
    const Lanes lanes;
    const MasterPlanes planes{f.weight, f.residue, f.master};
    const bool random = f.master == kSplit8 || f.master == kBf16;
    for (int64_t row = from; row < to; ++row) {
        const float *columns = held.column_factors.data() + row / f.height * f.width;
        const float by = held.row_factors[static_cast<size_t>(row)];
        const int64_t begin = row * f.width, end = begin + f.width;
        for (int64_t at = begin; at < end;) {
            const int64_t lane = at % kBlock, rest = end - at;
            const int64_t count = kBlock - lane < rest ? kBlock - lane : rest;
            if (random) draw(segment.random, lanes, (f.start + at) / kBlock, s.key_low, s.key_high);
            const float *own = columns + (at - begin);
            if (count == kBlock)  // a length that the compiler knows
                subtract_segment(f, s.grad_scale, planes, segment, at, kBlock, 0, by, own, held.factor, f.decay);
            else
                subtract_segment(f, s.grad_scale, planes, segment, at, count, lane, by, own, held.factor, f.decay);
            at += count;
        }
    }
}

// ---- threads

constexpr int64_t kHeldSums = 1 << 22;  // numbers that wait to be added: sums by column of tiles
constexpr int64_t kPiece = 1 << 16;     // elements, about, that a thread takes at a time

// Some rows of one parameter, counted over all its matrices.
struct Piece {
    int64_t parameter, from, to;
};

// `work(piece, index)` for the pieces from `first` to `last`. `make` gives each thread what it works with.
template <typename Make>
void share(const std::vector<Piece> &pieces, size_t first, size_t last, int team, const Make &make) {
#ifdef _OPENMP
#pragma omp parallel num_threads(team)
#else
    (void)team;
#endif
    {
        auto work = make();
#ifdef _OPENMP
#pragma omp for schedule(dynamic, 1)
#endif
        for (size_t index = first; index < last; ++index) work(pieces[index], index);
    }
}

// Pieces whose sums by column are one tree each.
std::vector<Piece> tiles_of(const Factored *parameters, int64_t count) {
    std::vector<Piece> pieces;
    for (int64_t p = 0; p < count; ++p) {
        const Factored &f = parameters[p];
        for (int64_t matrix = 0; matrix < f.matrices * f.height; matrix += f.height)
            for (int64_t row = 0; row < f.height; row += kTileRows)
                pieces.push_back({p, matrix + row, matrix + std::min(row + kTileRows, f.height)});
    }
    return pieces;
}

// Pieces of what is the same however rows are cut.
std::vector<Piece> slices_of(const Factored *parameters, int64_t count) {
    std::vector<Piece> pieces;
    for (int64_t p = 0; p < count; ++p) {
        const int64_t rows = parameters[p].matrices * parameters[p].height, some = std::max<int64_t>(kPiece / parameters[p].width, 1);
        for (int64_t row = 0; row < rows; row += some) pieces.push_back({p, row, std::min(row + some, rows)});
    }
    return pieces;
}

// Sums of squared gradients by row and by column.
void sums_of(const Factored *parameters, const Scalars &s, const std::vector<Piece> &tiles, std::vector<Held> &held,
             int team) {
    std::vector<float> sums;
    std::vector<int64_t> places(tiles.size());
    for (size_t first = 0, last = 0; first < tiles.size(); first = last) {
        int64_t needed = 0;
        for (; last < tiles.size() && (last == first || needed + parameters[tiles[last].parameter].width <= kHeldSums); ++last) {
            places[last] = needed;
            needed += parameters[tiles[last].parameter].width;
        }
        sums.resize(static_cast<size_t>(needed));
        share(tiles, first, last, team, [&] {
            return [&, columns = Columns()](const Piece &piece, size_t index) mutable {
                const Factored &f = parameters[piece.parameter];
                float *by_row = held[static_cast<size_t>(piece.parameter)].by_row.data();
                columns.of(f, s, piece.from, piece.to - piece.from, by_row, sums.data() + places[index]);
            };
        });
        for (size_t index = first; index < last; ++index) {
            const Piece &piece = tiles[index];
            const Factored &f = parameters[piece.parameter];
            float *by_column = held[static_cast<size_t>(piece.parameter)].by_column.data() + piece.from / f.height * f.width;
            add_range(by_column, sums.data() + places[index], f.width);
        }
    }
}

}  // namespace

extern "C" {

// One step over the `count` parameters of a unit: moments and masters in place.
void layerferry_factored_step(const Factored *parameters, int64_t count, const Scalars *scalars, int threads) {
    const Scalars &s = *scalars;
    std::vector<Held> held(static_cast<size_t>(count));
    int64_t elements = 0;
    for (int64_t p = 0; p < count; ++p) {
        const Factored &f = parameters[p];
        elements += f.matrices * f.height * f.width;
        held[static_cast<size_t>(p)].by_row.resize(static_cast<size_t>(f.matrices * f.height));
        held[static_cast<size_t>(p)].by_column.resize(static_cast<size_t>(f.matrices * f.width));
    }
    const std::vector<Piece> tiles = tiles_of(parameters, count), slices = slices_of(parameters, count);
    // TRAP: a team of another size than the one before has threads made or ended, so that it is one for all passes
    const int team = static_cast<int>(std::min<int64_t>(threads, elements / kMinPerThread + 1));
    sums_of(parameters, s, tiles, held, team);
    for (int64_t p = 0; p < count; ++p) take(parameters[p], s, held[static_cast<size_t>(p)]);
    share(slices, 0, slices.size(), team, [&] {
        return [&](const Piece &piece, size_t) {
            square_range(parameters[piece.parameter], s, piece.from, piece.to, held[static_cast<size_t>(piece.parameter)]);
        };
    });
    for (int64_t p = 0; p < count; ++p) {
        Held &own = held[static_cast<size_t>(p)];
        own.factor = clipped(parameters[p], s, sum_of(own.by_row.data(), static_cast<int64_t>(own.by_row.size())));
    }
    share(slices, 0, slices.size(), team, [&] {
        return [&](const Piece &piece, size_t) {
            subtract_range(parameters[piece.parameter], s, piece.from, piece.to, held[static_cast<size_t>(piece.parameter)]);
        };
    });
}

}  // extern "C"
