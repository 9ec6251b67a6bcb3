// Adafactor over a unit's parameters, stacks of matrices: three passes over gradients, the last over masters too, C ABI.
//
// What for: what a row and a column of squared gradients sum up must be known before the first element is updated, and the mean
// square of the whole update before it is applied. So it cannot be a rule of `formats.cpp`, and in torch every pass makes
// temporaries of several times its gradient. Here a row stays in the cache between its load and its sums; 14 bytes a parameter are
// moved. `layerferry/optim/reference_factored.py` is the same in torch, operation by operation; `tests/optim/test_adafactor.py`
// holds the two to the same bits, for every clone.
//
// Sums are trees by halving: element i of a level is i + (i + half), and an odd last one goes to the first. That is one order for
// every vector width. Sums by row run along the row in place. Sums by column run over the rows of a chunk, and are walked depth
// first, so that each row is read once and log2(rows) rows of sums are held; chunks are then added in their order, whichever thread
// had them.
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
    int64_t chunk_rows;  // rows of a matrix whose sums by column are one tree
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

// The sum of `count` numbers, which are overwritten.
CLONES float tree(float *values, int64_t count) {
    while (count > 1) {
        const int64_t half = count / 2;
        float *__restrict__ low = values;
        const float *__restrict__ high = values + half;
        for (int64_t i = 0; i < half; ++i) low[i] = low[i] + high[i];
        if (count % 2) values[0] = values[0] + values[2 * half];
        count = half;
    }
    return values[0];
}

template <typename Element>
INLINE float squared(Element grad, float grad_scale, float eps) {
    const float scaled = widen(grad) * grad_scale;
    return scaled * scaled + eps;
}

// ---- sums of the squared gradient

// Of one row: the squares themselves, and their sum.
template <typename Element>
INLINE float squares_of_row(const Element *__restrict__ row, int64_t width, float grad_scale, float eps, float *__restrict__ squares,
                            float *__restrict__ halves) {
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; ++i) {
        const float low = squared(row[i], grad_scale, eps), high = squared(row[i + half], grad_scale, eps);
        squares[i] = low;
        squares[i + half] = high;
        halves[i] = low + high;
    }
    if (width % 2) {
        squares[2 * half] = squared(row[2 * half], grad_scale, eps);
        halves[0] = half ? halves[0] + squares[2 * half] : squares[0];
    }
    return tree(halves, half ? half : 1);
}

// Of two rows that are neighbours in the tree: their squares summed by column, and the sum of each row.
template <typename Element>
INLINE void squares_of_pair(const Element *__restrict__ one, const Element *__restrict__ other, int64_t width, float grad_scale,
                            float eps, float *__restrict__ columns, float *__restrict__ halves, float &sum_of_one,
                            float &sum_of_other) {
    const int64_t half = width / 2;
    float *__restrict__ other_halves = halves + half + 1;
    for (int64_t i = 0; i < half; ++i) {
        const float one_low = squared(one[i], grad_scale, eps), one_high = squared(one[i + half], grad_scale, eps);
        const float other_low = squared(other[i], grad_scale, eps), other_high = squared(other[i + half], grad_scale, eps);
        columns[i] = one_low + other_low;
        columns[i + half] = one_high + other_high;
        halves[i] = one_low + one_high;
        other_halves[i] = other_low + other_high;
    }
    if (width % 2) {
        const float last = squared(one[2 * half], grad_scale, eps), other_last = squared(other[2 * half], grad_scale, eps);
        columns[2 * half] = last + other_last;
        halves[0] = half ? halves[0] + last : last;
        other_halves[0] = half ? other_halves[0] + other_last : other_last;
    }
    sum_of_one = tree(halves, half ? half : 1);
    sum_of_other = tree(other_halves, half ? half : 1);
}

CLONES void one_row(const Factored &f, const Scalars &s, int64_t row, float *columns, float *halves, float *by_row) {
    const int64_t at = row * f.width;
    by_row[row] = f.grad_is_fp32
                      ? squares_of_row(static_cast<const float *>(f.grad) + at, f.width, s.grad_scale, s.eps, columns, halves)
                      : squares_of_row(static_cast<const uint16_t *>(f.grad) + at, f.width, s.grad_scale, s.eps, columns, halves);
}

CLONES void two_rows(const Factored &f, const Scalars &s, int64_t one, int64_t other, float *columns, float *halves, float *by_row) {
    const int64_t width = f.width;
    if (f.grad_is_fp32) {
        const float *grad = static_cast<const float *>(f.grad);
        squares_of_pair(grad + one * width, grad + other * width, width, s.grad_scale, s.eps, columns, halves, by_row[one], by_row[other]);
    } else {
        const uint16_t *grad = static_cast<const uint16_t *>(f.grad);
        squares_of_pair(grad + one * width, grad + other * width, width, s.grad_scale, s.eps, columns, halves, by_row[one], by_row[other]);
    }
}

CLONES void add_range(float *__restrict__ sums, const float *__restrict__ values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) sums[i] = sums[i] + values[i];
}

// The tree of a chunk's rows. A thread has one, for all of its chunks.
class Columns {
  public:
    // Sums by column of `count` rows from `row` on; those by row go where they belong.
    void of(const Factored &f, const Scalars &s, int64_t row, int64_t count, float *by_row, float *into) {
        f_ = &f;
        s_ = &s;
        by_row_ = by_row;
        row_ = row;
        counts_.assign(1, count);
        while (counts_.back() > 1) counts_.push_back(counts_.back() / 2);
        enough(sums_, static_cast<int64_t>(counts_.size() - 1) * f.width);
        enough(halves_, 2 * (f.width / 2 + 1));
        node(counts_.size() - 1, 0, into);
    }

  private:
    static void enough(std::vector<float> &room, int64_t count) {
        if (static_cast<int64_t>(room.size()) < count) room.resize(static_cast<size_t>(count));
    }

    // Element `index` of level `depth`, where level 0 is the rows themselves.
    void node(size_t depth, int64_t index, float *into) {
        if (depth == 0) {
            one_row(*f_, *s_, row_ + index, into, halves_.data(), by_row_);
            return;
        }
        const int64_t half = counts_[depth];
        float *below = sums_.data() + static_cast<int64_t>(depth - 1) * f_->width;
        if (depth == 1) {
            two_rows(*f_, *s_, row_ + index, row_ + index + half, into, halves_.data(), by_row_);
        } else {
            node(depth - 1, index, into);
            node(depth - 1, index + half, below);
            add_range(into, below, f_->width);
        }
        if (index == 0 && counts_[depth - 1] % 2) {
            node(depth - 1, 2 * half, below);
            add_range(into, below, f_->width);
        }
    }

    const Factored *f_ = nullptr;
    const Scalars *s_ = nullptr;
    float *by_row_ = nullptr;
    int64_t row_ = 0;
    std::vector<int64_t> counts_;  // of the elements of each level
    std::vector<float> sums_, halves_;
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
    std::vector<float> tree_of_rows(f.rows, f.rows + rows);
    for (int64_t row = 0; row < rows; row += f.height) {
        const float mean = tree(tree_of_rows.data() + row, f.height) / static_cast<float>(f.height);
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
                           const float *__restrict__ column_factors, float *__restrict__ halves) {
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; ++i) {
        const float low = updated(row[i], grad_scale, row_factor, column_factors[i]);
        const float high = updated(row[i + half], grad_scale, row_factor, column_factors[i + half]);
        halves[i] = low * low + high * high;
    }
    if (width % 2) {
        const float last = updated(row[2 * half], grad_scale, row_factor, column_factors[2 * half]);
        halves[0] = half ? halves[0] + last * last : last * last;
    }
    return tree(halves, half ? half : 1);
}

CLONES void square_range(const Factored &f, const Scalars &s, int64_t from, int64_t to, float *halves, Held &held) {
    for (int64_t row = from; row < to; ++row) {
        const float *columns = held.column_factors.data() + row / f.height * f.width;
        const float by = held.row_factors[static_cast<size_t>(row)];
        const int64_t at = row * f.width;
        held.by_row[static_cast<size_t>(row)] =
            f.grad_is_fp32 ? square_of_row(static_cast<const float *>(f.grad) + at, f.width, s.grad_scale, by, columns, halves)
                           : square_of_row(static_cast<const uint16_t *>(f.grad) + at, f.width, s.grad_scale, by, columns, halves);
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

constexpr int64_t kHeldSums = 1 << 22;  // numbers that wait to be added: sums by column of chunks
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
std::vector<Piece> chunks_of(const Factored *parameters, int64_t count) {
    std::vector<Piece> pieces;
    for (int64_t p = 0; p < count; ++p) {
        const Factored &f = parameters[p];
        for (int64_t matrix = 0; matrix < f.matrices * f.height; matrix += f.height)
            for (int64_t row = 0; row < f.height; row += f.chunk_rows)
                pieces.push_back({p, matrix + row, matrix + std::min(row + f.chunk_rows, f.height)});
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
void sums_of(const Factored *parameters, const Scalars &s, const std::vector<Piece> &chunks, std::vector<Held> &held,
             int team) {
    std::vector<float> sums;
    std::vector<int64_t> places(chunks.size());
    for (size_t first = 0, last = 0; first < chunks.size(); first = last) {
        int64_t needed = 0;
        for (; last < chunks.size() && (last == first || needed + parameters[chunks[last].parameter].width <= kHeldSums); ++last) {
            places[last] = needed;
            needed += parameters[chunks[last].parameter].width;
        }
        sums.resize(static_cast<size_t>(needed));
        share(chunks, first, last, team, [&] {
            return [&, columns = Columns()](const Piece &piece, size_t index) mutable {
                const Factored &f = parameters[piece.parameter];
                float *by_row = held[static_cast<size_t>(piece.parameter)].by_row.data();
                columns.of(f, s, piece.from, piece.to - piece.from, by_row, sums.data() + places[index]);
            };
        });
        for (size_t index = first; index < last; ++index) {
            const Piece &piece = chunks[index];
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
    const std::vector<Piece> chunks = chunks_of(parameters, count), slices = slices_of(parameters, count);
    // TRAP: a team of another size than the one before has threads made or ended, so that it is one for all passes
    const int team = static_cast<int>(std::min<int64_t>(threads, elements / kMinPerThread + 1));
    sums_of(parameters, s, chunks, held, team);
    for (int64_t p = 0; p < count; ++p) take(parameters[p], s, held[static_cast<size_t>(p)]);
    share(slices, 0, slices.size(), team, [&] {
        return [&, halves = std::vector<float>()](const Piece &piece, size_t) mutable {
            const Factored &f = parameters[piece.parameter];
            halves.resize(static_cast<size_t>(f.width / 2 + 1));
            square_range(f, s, piece.from, piece.to, halves.data(), held[static_cast<size_t>(piece.parameter)]);
        };
    });
    std::vector<float> squares(static_cast<size_t>(count), 0.0f);
    for (const Piece &piece : chunks) {
        float &sum = squares[static_cast<size_t>(piece.parameter)];
        sum = sum + tree(held[static_cast<size_t>(piece.parameter)].by_row.data() + piece.from, piece.to - piece.from);
    }
    for (int64_t p = 0; p < count; ++p)
        held[static_cast<size_t>(p)].factor = clipped(parameters[p], s, squares[static_cast<size_t>(p)]);
    share(slices, 0, slices.size(), team, [&] {
        return [&](const Piece &piece, size_t) {
            subtract_range(parameters[piece.parameter], s, piece.from, piece.to, held[static_cast<size_t>(piece.parameter)]);
        };
    });
}

}  // extern "C"
