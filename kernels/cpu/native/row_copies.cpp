#include "row_copies.hpp"

#include <string.h>

#include "rank_group.hpp"

namespace {

float* area_of(const ExchangeArgs& a, int rank) {
    return reinterpret_cast<float*>(a.group->area(rank, (uint32_t)a.number));
}

}  // namespace

void select_rows(const SelectArgs& a, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
        memcpy(a.out + t * a.width, a.x + a.rows[t] * a.width, sizeof(float) * (size_t)a.width);
}

void place_rows(const PlaceRowsArgs& a, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
        if (a.index[t] < 0) continue;
        const float* row = a.rows + a.index[t] * a.row_stride;
        float* x = a.x + t * a.width;
        if (a.add)
            for (int64_t k = 0; k < a.width; ++k) x[k] += row[k];
        else
            memcpy(x, row, sizeof(float) * (size_t)a.width);
    }
}

void take_columns(const TakeArgs& a, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
        const float* x = a.x + t * a.width;
        float* out = a.out + t * a.width;
        if (a.back)
            for (int64_t k = 0; k < a.width; ++k) out[a.order[k]] = x[k];
        else
            for (int64_t k = 0; k < a.width; ++k) out[k] = x[a.order[k]];
    }
}

void send_rows(const ExchangeArgs& a, int64_t begin, int64_t end) {
    float* to = area_of(a, a.group->rank());
    for (int64_t t = begin; t < end; ++t)
        memcpy(to + t * a.width, a.x + t * a.x_stride, sizeof(float) * (size_t)a.own);
}

void receive_rows(const ExchangeArgs& a, int64_t begin, int64_t end) {
    if (!a.group->wait((uint32_t)a.number)) return;
    for (int rank = 0; rank < a.group->size(); ++rank) {
        const float* from = area_of(a, rank);
        const int64_t left = a.out_width - rank * a.width;
        const int64_t count = left < a.width ? left : a.width;
        for (int64_t t = begin; t < end; ++t) {
            const float* part = from + t * a.width;
            float* x = a.x + t * a.x_stride;
            if (a.out)
                memcpy(a.out + t * a.out_width + rank * a.width, part, sizeof(float) * (size_t)count);
            else if (rank)
                for (int64_t i = 0; i < a.width; ++i) x[i] += part[i];
            else
                memcpy(x, part, sizeof(float) * (size_t)a.width);
        }
    }
}
