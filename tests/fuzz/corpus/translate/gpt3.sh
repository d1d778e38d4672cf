m#!/bin/bash
# GPT-3 on 128 nodes
torchrun --nproc_per_node 8 --nnodes 128 --master_addr localhost pretrain_gpt.py \
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 \
    --seq-length 2048 --max-position-embeddings 2048 \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 \
    --num-layers-per-virtual-pipeline-stage 4 \
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce \
    --micro-batch-size 1 --global-batch-size 1536 --train-iters 500000 \
    --bf16 --lr 6.0e-5 --min-lr 6e-6 --lr-decay-style cosine --lr-warmup-iters 100 --clip-grad 1.0 \
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 \
    --data-path "my data" --tokenizer-type GPT2BPETokenizer --vocab-file v.json --merge-file 'm.txt' \
    --recompute-activations --unknown-thing 3 4 --fp8-format hybrid --save $CHECKPOINTS --log-interval 10
