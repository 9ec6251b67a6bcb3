// Adafactor over one parameter, a stack of matrices: three passes over the gradient, the last over the master too, C ABI.
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
// had them. Left out: prefetches (long rows, which the processor asks for itself).

#include <memory>
#include <vector>

#include "masters.h"

// Mirrors _Factored in layerferry/optim/native_factored.py.
struct Factored {
    void *weight;
    void *residue;
    const void *grad;
    int64_t matrices;
    int64_t height;
    int64_t width;
    int64_t chunk_rows;  // rows of a matrix whose sums by column are one tree
    int64_t start;       // place of the first element in its section, whole blocks: what the random numbers are counted by
    uint32_t key_low;
    uint32_t key_high;
    int32_t master;
    int32_t grad_is_fp32;
    float grad_scale;
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

CLONES void one_row(const Factored &f, int64_t row, float eps, float *columns, float *halves, float *by_row) {
    const int64_t at = row * f.width;
    by_row[row] = f.grad_is_fp32
                      ? squares_of_row(static_cast<const float *>(f.grad) + at, f.width, f.grad_scale, eps, columns, halves)
                      : squares_of_row(static_cast<const uint16_t *>(f.grad) + at, f.width, f.grad_scale, eps, columns, halves);
}

CLONES void two_rows(const Factored &f, int64_t one, int64_t other, float eps, float *columns, float *halves, float *by_row) {
    const int64_t width = f.width;
    if (f.grad_is_fp32) {
        const float *grad = static_cast<const float *>(f.grad);
        squares_of_pair(grad + one * width, grad + other * width, width, f.grad_scale, eps, columns, halves, by_row[one], by_row[other]);
    } else {
        const uint16_t *grad = static_cast<const uint16_t *>(f.grad);
        squares_of_pair(grad + one * width, grad + other * width, width, f.grad_scale, eps, columns, halves, by_row[one], by_row[other]);
    }
}

CLONES void add_range(float *__restrict__ sums, const float *__restrict__ values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) sums[i] = sums[i] + values[i];
}

// The tree of one chunk's rows. A thread has one, for all of its chunks.
class Columns {
  public:
    Columns(const Factored &f, float eps, float *by_row) : f_(f), eps_(eps), by_row_(by_row) {
        int64_t levels = 0;
        for (int64_t count = f.chunk_rows; count > 1; count /= 2) ++levels;
        sums_.resize(static_cast<size_t>(levels * f.width));
        halves_.resize(static_cast<size_t>(2 * (f.width / 2 + 1)));
    }

    // Sums by column of `count` rows from `row` on; those by row go where they belong.
    void of(int64_t row, int64_t count, float *into) {
        row_ = row;
        counts_.assign(1, count);
        while (counts_.back() > 1) counts_.push_back(counts_.back() / 2);
        node(counts_.size() - 1, 0, into);
    }

  private:
    // Element `index` of level `depth`, where level 0 is the rows themselves.
    void node(size_t depth, int64_t index, float *into) {
        if (depth == 0) {
            one_row(f_, row_ + index, eps_, into, halves_.data(), by_row_);
            return;
        }
        const int64_t half = counts_[depth];
        float *below = level(depth - 1);
        if (depth == 1) {
            two_rows(f_, row_ + index, row_ + index + half, eps_, into, halves_.data(), by_row_);
        } else {
            node(depth - 1, index, into);
            node(depth - 1, index + half, below);
            add_range(into, below, f_.width);
        }
        if (index == 0 && counts_[depth - 1] % 2) {
            node(depth - 1, 2 * half, below);
            add_range(into, below, f_.width);
        }
    }

    float *level(size_t depth) { return sums_.data() + static_cast<int64_t>(depth) * f_.width; }

    const Factored &f_;
    float eps_;
    float *by_row_;
    int64_t row_ = 0;
    std::vector<int64_t> counts_;  // of the elements of each level
    std::vector<float> sums_, halves_;
};

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

CLONES void square_range(const Factored f, int64_t from, int64_t to, const float *row_factors, const float *column_factors,
                         float *halves, float *by_row) {
    for (int64_t row = from; row < to; ++row) {
        const float *columns = column_factors + row / f.height * f.width;
        const int64_t at = row * f.width;
        by_row[row] = f.grad_is_fp32 ? square_of_row(static_cast<const float *>(f.grad) + at, f.width, f.grad_scale, row_factors[row],
                                                     columns, halves)
                                     : square_of_row(static_cast<const uint16_t *>(f.grad) + at, f.width, f.grad_scale,
                                                     row_factors[row], columns, halves);
    }
}

struct alignas(64) Segment {
    float master[kBlock], grad[kBlock];
    uint32_t random[kBlock];
};

// `count` elements of one row and one block of random numbers, of which `lane` is the first one's.
INLINE void subtract_segment(const Factored &f, const MasterPlanes &planes, Segment &s, int64_t at, int64_t count, int64_t lane,
                             float row_factor, const float *__restrict__ column_factors, float factor, float decay) {
    load_master(planes, at, count, s.master);
    load_grad(f.grad, f.grad_is_fp32, at, count, s.grad);
    for (int64_t i = 0; i < count; ++i) {
        const float step = updated(s.grad[i], f.grad_scale, row_factor, column_factors[i]) * factor;
        s.master[i] = s.master[i] - (step + s.master[i] * decay);
    }
    store_master(planes, at, count, s.master, s.random + lane);
}

CLONES void subtract_range(const Factored f, int64_t from, int64_t to, const float *row_factors, const float *column_factors,
                           float factor, float decay) {
    Segment segment;
    const Lanes lanes;
    const MasterPlanes planes{f.weight, f.residue, f.master};
    const bool random = f.master == kSplit8 || f.master == kBf16;
    for (int64_t row = from; row < to; ++row) {
        const float *columns = column_factors + row / f.height * f.width;
        const int64_t begin = row * f.width, end = begin + f.width;
        for (int64_t at = begin; at < end;) {
            const int64_t lane = at % kBlock, rest = end - at;
            const int64_t count = kBlock - lane < rest ? kBlock - lane : rest;
            if (random) draw(segment.random, lanes, (f.start + at) / kBlock, f.key_low, f.key_high);
            if (count == kBlock)  // a length that the compiler knows
                subtract_segment(f, planes, segment, at, kBlock, 0, row_factors[row], columns + (at - begin), factor, decay);
            else
                subtract_segment(f, planes, segment, at, count, lane, row_factors[row], columns + (at - begin), factor, decay);
            at += count;
        }
    }
}

// ---- threads

constexpr int64_t kHeldChunks = 64;  // whose sums by column are held before they are added, a row each
int team_of(const Factored &f, int64_t parts, int threads) {
    const int64_t useful = f.matrices * f.height * f.width / kMinPerThread + 1;
    const int64_t most = parts < useful ? parts : useful;
    return static_cast<int>(threads < most ? threads : most);
}

// One contiguous range of rows per thread; for what is the same however rows are cut.
template <typename Range>
void parallel_rows(const Factored &f, int threads, const Range &range) {
    const int64_t rows = f.matrices * f.height;
#ifdef _OPENMP
    const int team = team_of(f, rows, threads);
    if (team > 1) {
#pragma omp parallel num_threads(team)
        {
            const int64_t members = omp_get_num_threads(), member = omp_get_thread_num();
            range(rows * member / members, rows * (member + 1) / members);
        }
        return;
    }
#else
    (void)threads;
#endif
    range(0, rows);
}

// Sums by column of the chunks from `first` to `last`, counted over all matrices, each in a place of its own. Whichever thread is
// free takes the next one; none waits for another before the end, which costs most where other programs have the cores.
void sums_of_parts(const Factored &f, int64_t chunks, int64_t first, int64_t last, float eps, float *sums, float *by_row, int team) {
#ifdef _OPENMP
#pragma omp parallel num_threads(team)
#else
    (void)team;
#endif
    {
        Columns columns(f, eps, by_row);
#ifdef _OPENMP
#pragma omp for schedule(dynamic, 1)
#endif
        for (int64_t part = first; part < last; ++part) {
            const int64_t row = part % chunks * f.chunk_rows, rest = f.height - row;
            columns.of(part / chunks * f.height + row, rest < f.chunk_rows ? rest : f.chunk_rows, sums + (part - first) * f.width);
        }
    }
}

}  // namespace

extern "C" {

// `by_row` [matrices * height] and `by_column` [matrices * width], the latter zero before.
void layerferry_factored_sums(const Factored *factored, float eps, float *by_row, float *by_column, int threads) {
    const Factored &f = *factored;
    const int64_t chunks = (f.height + f.chunk_rows - 1) / f.chunk_rows, parts = f.matrices * chunks;
    const int64_t held = parts < kHeldChunks ? parts : kHeldChunks;
    const std::unique_ptr<float[]> sums(new float[static_cast<size_t>(held * f.width)]);
    for (int64_t first = 0; first < parts; first += held) {
        const int64_t last = first + held < parts ? first + held : parts;
        sums_of_parts(f, chunks, first, last, eps, sums.get(), by_row, team_of(f, last - first, threads));
        for (int64_t part = first; part < last; ++part)
            add_range(by_column + part / chunks * f.width, sums.get() + (part - first) * f.width, f.width);
    }
}

// The sum of the squared update. `by_row` [matrices * height] is room.
float layerferry_factored_square(const Factored *factored, const float *row_factors, const float *column_factors, float *by_row,
                                 int threads) {
    const Factored &f = *factored;
    parallel_rows(f, threads, [=](int64_t from, int64_t to) {
        std::vector<float> halves(static_cast<size_t>(factored->width / 2 + 1));
        square_range(*factored, from, to, row_factors, column_factors, halves.data(), by_row);
    });
    float sum = 0.0f;
    for (int64_t matrix = 0; matrix < f.matrices; ++matrix)
        for (int64_t first = 0; first < f.height; first += f.chunk_rows) {
            const int64_t rows = f.height - first < f.chunk_rows ? f.height - first : f.chunk_rows;
            sum = sum + tree(by_row + matrix * f.height + first, rows);
        }
    return sum;
}

// The update times `factor`, and the decay, from the master.
void layerferry_factored_subtract(const Factored *factored, const float *row_factors, const float *column_factors, float factor,
                                  float decay, int threads) {
    parallel_rows(*factored, threads, [=](int64_t from, int64_t to) {
        subtract_range(*factored, from, to, row_factors, column_factors, factor, decay);
    });
}

}  // extern "C"
