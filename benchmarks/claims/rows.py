"""The rows of docs/claims.md: each claim with its source, what corresponds to it, and what came out.

A figure is a format text whose fields name a result file and an id in it, so that the page shows
only figures from files. A verdict is written by a person, who must check it after a new
measurement.
"""

import string
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Verdict of the measurement on the claim."""

    HOLDS = "holds"
    IN_PART = "in part"
    FAILS = "does not hold"
    UNTRIED = "cannot be tried"


@dataclass(frozen=True, slots=True)
class Claim:
    """A row."""

    topic: str
    """One of `TOPICS`."""
    claim: str
    """What is claimed, in our words."""
    source: str
    """Which work, and where in it."""
    measured: str
    """The corresponding measurement here, and its size."""
    figure: str
    """The figure, as a format text over result files and ids; words alone where there is none."""
    command: str
    """What measures it."""
    verdict: Verdict
    why: str = ""
    """Reason for the verdict; required unless the claim holds."""

    @property
    def files(self) -> set[str]:
        """Return the result files that the figure is from."""
        fields = (name for _, name, _, _ in string.Formatter().parse(self.figure) if name)
        return {field.partition("[")[0] for field in fields}


TOPICS = {
    "proofs": "TOPLOC: proofs of inference",
    "honesty": "Validation of untrusted workers",
    "broadcast": "SHARDCAST and asynchrony",
    "recipe": "Training recipe",
    "network": "The network",
    "data": "Synthetic data",
    "results": "Results of the large runs",
}
"""Sections of the page, in order, and their titles."""

PLOTS = {
    "broadcast": {
        "claims-broadcast": "What workers do, by how old a rollout may be",
        "asynchrony": "Held-out reward by policy version for rollouts 0, 1, 2 and 4 versions old",
    },
    "recipe": {
        "claims-clip": "Gradient norms and held-out reward with injected spikes",
        "claims-filters": "Held-out reward by policy version, by filter",
        "claims-lengths": "Mean distance from the length budget by policy version",
    },
}
"""Drawings below a section's table, with what they show."""

_CHEAT = "{{calibration[detail/4x256:{0}/cheats/name={1}/{2}]}}"


def _accepted(case: str, cheat: str) -> str:
    counts = (_CHEAT.format(case, cheat, what) for what in ("accepted", "trials"))
    return " of ".join(counts)


CLAIMS: tuple[Claim, ...] = (
    # ------------------------------------------------------------------------------- TOPLOC
    Claim(
        "proofs",
        "Validating is up to 100 times faster than generating",
        "TOPLOC, abstract; I2, infrastructure",
        "CPU time of a validator's check (one prefill, proofs, replay of the sampling) against that of generating the same tokens: one completion of 512 tokens, a batch of 16 (4 layers x 256), a batch of 8 with 64 new tokens on Qwen3-0.6B's shape; time on one H200 for 16 completions of 2,000 tokens of that shape",
        "{toploc[1/validate_over_generate]:.0f} times; {toploc[1/validate_over_generate_16]:.1f} times; {size[1/examine_over_generate_8x64]:.1f} times; {gpu-examination[1/gpu_examine_over_generate]:.1f} times",
        "make bench-toploc",
        Verdict.FAILS,
        "a CPU is bound by arithmetic in both, and a batch shares each token's overhead; the factor holds for GPUs that generate with small batches; here steps are replayed as CUDA graphs and layers have fused kernels, which makes generation four times as fast",
    ),
    Claim(
        "proofs",
        "A proof takes a thousandth of the memory of the hidden states that it stands for: 258 bytes for 32 tokens",
        "TOPLOC, abstract and release post",
        "Bytes of proofs that are built here, a token; hidden states of width 5,120 (a 32B model) and 4,096 (8B) in bfloat16 over them; the same for a completion of 5 tokens",
        "{claims[proof_bytes_per_token]:.2f} bytes a token; {claims[hidden_over_proof_5120]:.0f} and {claims[hidden_over_proof_4096]:.0f} times less; {claims[proof_bytes_per_token_of_5]:.1f} bytes a token of 5",
        'make claims ARGS="proofs"',
        Verdict.HOLDS,
        "for completions of 32 tokens and more: the last chunk's proof is as large as any",
    ),
    Claim(
        "proofs",
        "Building proofs costs about 1 % of a worker's throughput",
        "I2, infrastructure",
        "CPU time spent on proofs over that of all generation, where logits cost next to nothing (4 layers x 256, 44 tokens), completions of 512 tokens",
        "{toploc[proof_overhead]:.1%}",
        "make bench-toploc",
        Verdict.HOLDS,
    ),
    Claim(
        "proofs",
        "Another model is detected, always",
        "TOPLOC, abstract",
        "Submissions of a smaller model, a sibling, or disturbed weights that were caught, of those tried in a network's checks (red team A1)",
        "{redteam[detail/attack=A1/caught]} of {redteam[detail/attack=A1/trials]}",
        "make bench-redteam",
        Verdict.HOLDS,
    ),
    Claim(
        "proofs",
        "Another prompt is detected, always",
        "TOPLOC, abstract",
        "Submissions with altered prompts caught in a network (A3), where prompts are derived again; and single samples with one prompt token altered that pass proofs and sampling alone, in bfloat16 and float32 (4 x 256)",
        "{redteam[detail/attack=A3/caught]} of {redteam[detail/attack=A3/trials]}; "
        + _accepted("bfloat16", "one prompt token altered")
        + " and "
        + _accepted("float32", "one prompt token altered")
        + " pass",
        "make bench-redteam",
        Verdict.IN_PART,
        "a token early in a prompt moves a small model's hidden states less than bfloat16 rounding does. A ticket pins the prompt, so nothing depends on this",
    ),
    Claim(
        "proofs",
        "Lower precision is detected: quantised weights",
        "TOPLOC, abstract and release post",
        "Submissions with quantised weights or keys and values caught in a network that calculates in float32 (A2); samples of int4, fp8 and int8 weights that pass in a bfloat16 network (4 x 256)",
        "{redteam[detail/attack=A2/caught]} of {redteam[detail/attack=A2/trials]}; "
        + ", ".join(_accepted("bfloat16", f"weights in {each}") for each in ("int4", "fp8", "int8"))
        + " pass",
        "make bench-calibration",
        Verdict.IN_PART,
        "in float32 all are found. In bfloat16 a submission of 128 samples in int4 is always found, while int8 and fp8 are as near as honest engines are to one another at this width",
    ),
    Claim(
        "proofs",
        "A compressed key-value cache is detected",
        "TOPLOC, release post",
        "Samples that pass with the cache in int8 and int4: bfloat16, then float32 (4 x 256)",
        _accepted("bfloat16", "int8 key-value cache")
        + " and "
        + _accepted("bfloat16", "int4 key-value cache")
        + "; "
        + _accepted("float32", "int8 key-value cache")
        + " and "
        + _accepted("float32", "int4 key-value cache"),
        "make bench-calibration",
        Verdict.IN_PART,
        "int4 is found in nearly every submission of 128 samples, int8 in bfloat16 is not found",
    ),
    Claim(
        "proofs",
        "Proofs are robust across engines, attention kernels and batch sizes",
        "TOPLOC, abstract",
        "Honest samples refused, of all pairs of ways to compute (batches, padding, threads, two attention kernels, decoding with a cache); honest rollouts refused in the red team's 182 cells, vLLM against transformers among them",
        "{calibration[honest_failed]:.0f} (below {calibration[honest_rate_below]:.2%} at 95 %); {redteam[honest_rejected]:.0f} of {redteam[honest_rollouts]:,.0f}",
        "make bench-redteam",
        Verdict.HOLDS,
    ),
    Claim(
        "proofs",
        "Proofs are robust across tensor-parallel layouts",
        "TOPLOC, abstract",
        "Honest samples refused between layouts of 1, 2 and 4 devices, of all; their mean strain at worst (1 is the limit). Emulated by their arithmetic, bfloat16, 4 layers x 128, limits made of work on one device",
        "{claims[layout_refused]:.0f} of {claims[layout_samples]:.0f}; {claims[layout_strain_max]:.2f}",
        'make claims ARGS="proofs"',
        Verdict.HOLDS,
        "in emulation: no two GPUs were here",
    ),
    Claim(
        "proofs",
        "Proofs are robust across types of GPU",
        "TOPLOC, abstract",
        "One H200 beside its CPU: samples of 8 layers x 512 in bfloat16 that each made and the other examined, rejected by the least limits of any calibration; the largest margin of a token, in nats",
        "{gpu-margins[gpu_margins_rejected_bfloat16]:.0f} of 64 rejected; {gpu-margins[gpu_margin_largest_bfloat16]:.3f}",
        "make bench-gpu",
        Verdict.IN_PART,
        "one type of GPU against a CPU, and a model with random weights",
    ),
    # --------------------------------------------------------------------------- validation
    Claim(
        "honesty",
        "Honest work is nearly never refused: 37 of 4 million samples in SYNTHETIC-2",
        "S2",
        "Honest rollouts refused by all checks, and the bound of their rate at 95 %",
        "{redteam[honest_rejected]:.0f} of {redteam[honest_rollouts]:,.0f}, below {redteam[false_positive_upper]:.4%}",
        "make bench-redteam",
        Verdict.IN_PART,
        "none was refused, but 30,000 rollouts cannot show a rate of 1 in 100,000",
    ),
    Claim(
        "honesty",
        "A worker that generates with a small model and proves with the large one is found by the probabilities of its tokens",
        "I2, infrastructure (token sampling check)",
        "Submissions with a cheaper model's text and the policy's own proofs (A4), and of lax speculative decoding (A5), that were caught. The check here is stronger: each token follows from the ticket's seed",
        "{redteam[detail/attack=A4/caught]} of {redteam[detail/attack=A4/trials]}, {redteam[detail/attack=A5/caught]} of {redteam[detail/attack=A5/trials]}",
        "make bench-redteam",
        Verdict.HOLDS,
    ),
    Claim(
        "honesty",
        "Problems and seeds that are fixed per worker and step prevent a worker from choosing favourable ones",
        "I2, infrastructure (fixed data sampling)",
        "Caught: problems chosen (A12), samples drawn again and again (A14), of those tried",
        "{redteam[detail/attack=A12/caught]} of {redteam[detail/attack=A12/trials]}, {redteam[detail/attack=A14/caught]} of {redteam[detail/attack=A14/trials]}",
        "make bench-redteam",
        Verdict.HOLDS,
    ),
    Claim(
        "honesty",
        "A completion that was cut short is found: it must end with a likely EOS or at the limit",
        "I2, infrastructure (termination check)",
        "Completions ended early (A18) or drawn out (A19) that were caught",
        "{redteam[detail/attack=A18/caught]} of {redteam[detail/attack=A18/trials]}, {redteam[detail/attack=A19/caught]} of {redteam[detail/attack=A19/trials]}",
        "make bench-redteam",
        Verdict.HOLDS,
    ),
    Claim(
        "honesty",
        "Rewards that a worker makes up are kept out by bounds",
        "I2, infrastructure (value bounds)",
        "Rewards and units made up (A16) that were caught. Bounds alone do not do it: any reward inside them would pass, so validators grade again",
        "{redteam[detail/attack=A16/caught]} of {redteam[detail/attack=A16/trials]}",
        "make bench-redteam",
        Verdict.IN_PART,
        "with grading again, not with bounds",
    ),
    Claim(
        "honesty",
        "Stake and slashing make dishonest work unprofitable",
        "I2, infrastructure; protocol testnet",
        "Largest mean profit of an economic attack of the red team, in tokens; attacks tried in all, defences that failed",
        "{redteam[profit_max_economic]:.0f}; {redteam[attacks]:.0f}, {redteam[defences_failed]:.0f}",
        "make bench-redteam",
        Verdict.HOLDS,
        "as far as these attacks go",
    ),
    Claim(
        "honesty",
        "Verifying takes about a minute from a submission to its verdict",
        "I2, experiments (compute utilisation)",
        "Median virtual seconds from upload to verdict on chain, 10,000 workers and 88 validators of whom three must agree, a quarter of a second for a check",
        "{simulator[verdict_median_s]:.0f} s",
        "make bench-simulator",
        Verdict.HOLDS,
        "with that time for a check; a check of 32B takes longer, and then more validators are needed",
    ),
    # ---------------------------------------------------------------------------- broadcast
    Claim(
        "broadcast",
        "A tree of relays passes shards on while others still arrive, so that depth costs little",
        "I2, infrastructure (SHARDCAST)",
        "Time from the origin to all clients through relays, verified, over one bare copy across the loopback, 64 MiB and 2 GiB",
        "{shardcast[hop_ratio_64]:.1f} and {shardcast[hop_ratio_2048]:.1f} times",
        "make bench-shardcast",
        Verdict.IN_PART,
        "all processes share two cores, so that copies and hashes of several nodes add up; on links of their own they would not",
    ),
    Claim(
        "broadcast",
        "62 GB reach all workers in 14 minutes, at 590 Mb/s",
        "I2, experiments",
        "Nothing of that size or distance",
        "none",
        "make bench-shardcast",
        Verdict.UNTRIED,
        "one machine, no links of that kind, and no 62 GB",
    ),
    Claim(
        "broadcast",
        "Damaged weights are found by their hash and not used",
        "I2, infrastructure (SHARDCAST)",
        "Fetches of damaged, cut, older or other weights that were found (A34). A chunk is checked by itself here and asked for elsewhere, instead of the version being given up",
        "{redteam[detail/attack=A34/caught]} of {redteam[detail/attack=A34/trials]}",
        "make bench-redteam",
        Verdict.HOLDS,
    ),
    Claim(
        "broadcast",
        "Rollouts one, two and four steps old train as well as fresh ones",
        "I2, experiments (asynchrony ablation)",
        "Held-out reward after 32 steps with rollouts exactly 0, 1, 2, 4 versions old; medians of five seeds, 0.1M parameters, sorting digits, learning rate 7e-4",
        "{asynchrony[reward_level_0]:.3f}, {asynchrony[reward_level_1]:.3f}, {asynchrony[reward_level_2]:.3f}, {asynchrony[reward_level_4]:.3f}",
        "make bench-asynchrony",
        Verdict.IN_PART,
        "one and two steps cost nothing. Four cost 0.04 at this learning rate, 0.01 at half of it ([training](training.md#asynchrony))",
    ),
    Claim(
        "broadcast",
        "With two-step asynchrony the broadcast is overlapped wholly by inference and training",
        "I2, abstract and infrastructure; release post",
        "Share of workers' time that is spent waiting for weights, by versions that a rollout may be old (0, 1, 2, 4), and steps an hour; TARGET-SHORT's times (14 min to fetch, 22 to sample, 22 to train), 6 workers, production programs in virtual time",
        "{claims[weights_wait_level_0]:.1%}, {claims[weights_wait_level_1]:.1%}, {claims[weights_wait_level_2]:.1%}, {claims[weights_wait_level_4]:.1%}; {claims[steps_per_hour_level_0]:.2f}, {claims[steps_per_hour_level_1]:.2f}, {claims[steps_per_hour_level_2]:.2f}, {claims[steps_per_hour_level_4]:.2f} steps",
        'make claims ARGS="swarm"',
        Verdict.IN_PART,
        "two steps of delay double the steps an hour and leave no worker without work, but a quarter of the time is waiting for weights: tickets name the newest version, so that only the work under way overlaps a fetch",
    ),
    # ------------------------------------------------------------------------------- recipe
    Claim(
        "recipe",
        "Clipping the ratio on both sides prevents spikes of the gradient that plain GRPO has",
        "I2, training recipe (two-sided clipping)",
        "Spikes injected: a quarter of the groups of every fourth step name disturbed weights. Median and largest gradient norm of those steps before clipping, one-sided against two-sided; without spikes; three seeds, demo model and recipe",
        "{claims[clip_norm_one_spiked]:.1f}, at most {claims[clip_norm_max_one_spiked]:,.0f}, against {claims[clip_norm_two_spiked]:.1f}, at most {claims[clip_norm_max_two_spiked]:.1f}; calm {claims[clip_norm_one_calm]:.1f} and {claims[clip_norm_two_calm]:.1f}",
        'make claims ARGS="clip"',
        Verdict.HOLDS,
    ),
    Claim(
        "recipe",
        "Two-sided clipping keeps training stable where spikes would ruin it",
        "I2, training recipe; release post",
        "Held-out reward after 20 steps with those spikes, one-sided and two-sided; without spikes. Means of three seeds",
        "{claims[clip_reward_one_spiked]:.3f} and {claims[clip_reward_two_spiked]:.3f}; {claims[clip_reward_one_calm]:.3f} and {claims[clip_reward_two_calm]:.3f}",
        'make claims ARGS="clip"',
        Verdict.IN_PART,
        "spikes cost either loss about 0.01 of reward and ruin none: the norm of the gradient is clipped at 1, and AdamW divides by its past size. The two-sided loss is ahead by 0.02 with spikes and without",
    ),
    Claim(
        "recipe",
        "Keeping problems that are solved 12.5 % to 50 % of the time is what lets a run learn (offline filter)",
        "I2, training recipe (0.34 to 0.42 against hardly any gain)",
        "Held-out reward after 12 steps of 32 groups, unfiltered and filtered, where three quarters of the problems teach nothing; means of three seeds",
        "{claims[filters_reward_none]:.3f} and {claims[filters_reward_offline]:.3f}",
        'make claims ARGS="filters"',
        Verdict.IN_PART,
        "the gain grows by a third. Unfiltered, the run learns too: problems that teach nothing cost samples, and mislead nobody",
    ),
    Claim(
        "recipe",
        "Sampling until a batch is full of samples with an advantage improves learning (online filter)",
        "I2, training recipe",
        "The same with groups replaced until 32 have an advantage, and with both filters; groups generated in 12 steps without, online, with both",
        "{claims[filters_reward_online]:.3f} and {claims[filters_reward_both]:.3f}; {claims[filters_groups_none]:.0f}, {claims[filters_groups_online]:.0f}, {claims[filters_groups_both]:.0f} groups",
        'make claims ARGS="filters"',
        Verdict.HOLDS,
        "for each training step, at three times the samples. The offline filter gains more without extra samples",
    ),
    Claim(
        "recipe",
        "A run learns to keep short length budgets (TARGET-SHORT)",
        "I2, training recipe and experiments: the length penalty falls, slowly",
        "Mean distance from budgets of 8 to 14 tokens before and after 32 steps, with the length part added as in I2, and normalised apart; 0.1M parameters, one seed",
        "{claims[length_error_start_short_joint]:.1f} to {claims[length_error_end_short_joint]:.1f}; {claims[length_error_start_short_apart]:.1f} to {claims[length_error_end_short_apart]:.1f} tokens",
        'make claims ARGS="lengths"',
        Verdict.HOLDS,
    ),
    Claim(
        "recipe",
        "A run learns to keep long length budgets (TARGET-LONG)",
        "I2, training recipe and experiments: not learned by the end of the run",
        "The same with budgets of 12 to 20 tokens; and in a whole network, normalised apart, 40 steps, how far the distance fell",
        "{claims[length_error_start_long_joint]:.1f} to {claims[length_error_end_long_joint]:.1f}; {claims[length_error_start_long_apart]:.1f} to {claims[length_error_end_long_apart]:.1f} tokens; {length[length_error_fall]:.0%}",
        "make example-length",
        Verdict.IN_PART,
        "the distance halves where that of short budgets falls by two thirds and more; it still falls. I2 reports the same order: small studies learn it, its long run had not",
    ),
    Claim(
        "recipe",
        "Inference takes 4.5 times the computation of training",
        "I2, experiments (compute utilisation)",
        "Operations, and CPU time, of sampling over those of training, without filters and with online ones that discard two groups of three; 2 operations a weight and token to sample, 8 to train",
        "{claims[flop_ratio_none]:.2f} and {claims[flop_ratio_online]:.2f} in operations, {claims[compute_ratio_none]:.1f} and {claims[compute_ratio_online]:.1f} in CPU time",
        'make claims ARGS="filters"',
        Verdict.FAILS,
        "a token costs four times as many operations to train as to sample, so 4.5 needs 18 sampled tokens for a trained one. What a run reaches follows from how much its filters discard",
    ),
    Claim(
        "recipe",
        "Gradient norm, clip ratio and entropy rise slowly before a large run collapses",
        "I2, training recipe (stability findings)",
        "Nothing: they are reported of 32B and not of 7B. The trainer raises alarms on these figures ([losses](losses.md))",
        "none",
        "make bench-asynchrony",
        Verdict.UNTRIED,
        "models of this size do not show it",
    ),
    # ------------------------------------------------------------------------------ network
    Claim(
        "network",
        "Unequal and unreliable workers do not hold a run up, and a dead one never blocks a step",
        "I2, abstract and infrastructure; release post",
        "Steps a minute of 24 workers of whom half are ten times slower, a third of all nodes killed in every minute, against 24 equal ones that nobody kills; uploaded submissions, and those lost. Production programs in virtual time. Half of the workers at a tenth of the speed alone leave 55 %",
        "{claims[swarm_steps_per_minute]:.2f} against {claims[equal_steps_per_minute]:.2f}; {claims[swarm_submissions]:,.0f}, {claims[swarm_lost]:.0f} lost; {claims[swarm_kills_per_minute]:.1f} workers killed a minute",
        'make claims ARGS="swarm"',
        Verdict.HOLDS,
    ),
    Claim(
        "network",
        "Anybody may join a run under way, without leave",
        "I2, release post",
        "Seconds from `muster worker run` on a machine that has no policy yet to its first accepted submission, while a run goes on; every process real. Staking is a transaction that asks nobody",
        "{worker[first_accepted_s]:.1f} s",
        "make bench-worker",
        Verdict.HOLDS,
    ),
    Claim(
        "network",
        "Training over the internet (DiLoCo) takes 400 times less communication",
        "I1, abstract: 100 inner steps, int8",
        "Bytes of two trainer sites that exchange every training step's movement in few bits, against all-reducing every gradient in float32; reward 0.7 after as many steps of either",
        "{diloco[traffic_ratio]:.0f} times less; {diloco[steps_to_reward]:.0f} and {diloco[steps_to_reward_reference]:.0f} steps",
        "make bench-diloco",
        Verdict.IN_PART,
        "with 27 inner steps on average in place of 100: the factor is their number times the smaller numbers",
    ),
    Claim(
        "network",
        "A run scales across different kinds of GPU around the world",
        "I2, release post",
        "Nothing with GPUs. 10,000 workers in virtual time: requests and gas a submission",
        "{simulator[messages_per_submission]:.0f} requests, {simulator[gas_per_submission]:,.0f} gas",
        "make bench-simulator",
        Verdict.UNTRIED,
        "no GPU and no internet: the programs are the real ones, machines and links are simulated",
    ),
    # --------------------------------------------------------------------------------- data
    Claim(
        "data",
        "1.4 million tasks with verifiers",
        "S1",
        "A million rows in GENESYS's form imported: CPU seconds and memory; and an answer in mathematics verified, per CPU second",
        "{tasks[import_1m_s]:.0f} s, {tasks[import_1m_rss_mb]:.0f} MB; {tasks[math_verify_per_s]:.0f}",
        "make bench-tasks",
        Verdict.IN_PART,
        "as many rows can be used; the rows themselves, made by people and models, are not here",
    ),
    Claim(
        "data",
        "A public run of strangers makes a data set of verified traces",
        "S1: 2 million traces",
        "A million rows exported with a proof of each, and verified against the ledger: CPU seconds, memory",
        "{data[data_1m_cpu_s]:.0f} s, {data[data_1m_rss_mb]:.0f} MB",
        "make bench-data",
        Verdict.IN_PART,
        "rows are made up: no strangers generated them. A run of this kind is walked through in `make test`",
    ),
    Claim(
        "data",
        "Verified reasoning data and fine-tuning on them come first, reinforcement with verifiable rewards second",
        "S1, two steps as in DeepSeek-R1",
        "Held-out accuracy of a student of 2.3M parameters that has read texts of mixed quality, after fine-tuning on a teacher's data run, and after reinforcement on a network; and the teacher's. Three tasks, temperature 1",
        "{reasoning[reward_pretrained]:.2f}, {reasoning[reward_fine_tuned]:.2f}, {reasoning[reward_reinforced]:.2f}; {reasoning[reward_teacher]:.2f}",
        "make example-reasoning",
        Verdict.IN_PART,
        "both raise the accuracy of samples, most in programs; fine-tuning lowers it in mathematics, where reinforcement raises it again; in words and for nearly greedy answers neither stage surely adds anything ([the lesson](runs/reasoning.md))",
    ),
    Claim(
        "data",
        "A curated part of the traces fine-tunes models",
        "S1: 0.9 million rows",
        "Tokens per CPU second of `muster trainer sft` over TRL's SFTTrainer, eight rows a problem and one, completions of 160 tokens in the median; largest difference of a step's loss, in nats",
        "{sft[tokens_ratio_8_a_problem_long]:.1f} and {sft[tokens_ratio_1_a_problem_long]:.1f} times; {sft[loss_difference]:.1e}",
        "make bench-sft",
        Verdict.IN_PART,
        "speed and numbers on a CPU, 3.3M parameters; the effect of the traces on a model of billions was not tried",
    ),
    # ------------------------------------------------------------------------------ results
    Claim(
        "results",
        "INTELLECT-2 improves on QwQ-32B in mathematics and code",
        "I2, experiments (AIME24 78.8 against 76.6)",
        "Nothing of that size. Held-out reward of the example that calls a tool, before and after a run on a whole network",
        "{calculator[reward_start]:.2f} to {calculator[reward_end]:.2f}",
        "make example-calculator",
        Verdict.UNTRIED,
        "no GPU, no 32B model, and no weeks",
    ),
    Claim(
        "results",
        "Task reward rises through the whole of a decentralised run",
        "I2, experiments (reward curves)",
        "Held-out reward of the length example on a whole network, first and last version; its outcomes are all accepted and the audit is clean",
        "{length[reward_start]:.2f} to {length[reward_end]:.2f}",
        "make example-length",
        Verdict.HOLDS,
        "at 0.1M parameters",
    ),
)
