"""Strings of warnings, guards and verdicts, English and Chinese side by side."""

MESSAGES: dict[str, tuple[str, str]] = {
    "list.separator": (", ", "、"),
    "sentence.separator": (" ", ""),
    # -- run folders that cannot be read
    "warn.config": (
        "left out, its config cannot be read: {error}",
        "未计入：无法读取其配置：{error}",
    ),
    "warn.file": ("{file} cannot be used: {error}", "{file} 无法使用：{error}"),
    "warn.no_results": (
        "status.json says finished, but there is no results.json",
        "status.json 标记为已完成，但缺少 results.json",
    ),
    "warn.damaged": (
        "left out, it is not what the run wrote: {files}. Run it again, or put the files back from a copy",
        "未计入：内容与运行时写入的不一致：{files}。请重新运行，或从备份恢复这些文件",
    ),
    "warn.predictions": (
        "predictions.json holds no two lists of equal length; the test-set error is taken from the "
        "binomial instead",
        "predictions.json 中没有两个等长的列表；测试集误差改用二项分布估计",
    ),
    "warn.predictions_differ": (
        "predictions.json gives an accuracy of {predicted}, results.json says {stated}; its predictions "
        "are not used",
        "predictions.json 算得准确率 {predicted}，而 results.json 记录为 {stated}；不使用这些预测",
    ),
    "warn.place": (
        "the folder's path lacks '{expected}', which its config.yaml says; was it moved by hand? The "
        "config counts",
        "文件夹路径中没有其 config.yaml 所写的“{expected}”；是否被手动移动过？以配置为准",
    ),
    "warn.double": (
        "the same run (study, ID, scale, seed) also lies in {other}; only that one counts",
        "同一次运行（研究、编号、规模、种子）也存在于 {other}；只计入后者",
    ),
    "warn.benchmark": ("no benchmark that can be read: {error}", "无法读取的基准测试文件：{error}"),
    # -- states
    "state.finished": ("finished", "已完成"),
    "state.running": ("running", "运行中"),
    "state.interrupted": ("interrupted", "已中断"),
    "state.diverged": ("diverged", "已发散"),
    "state.failed": ("failed", "失败"),
    "state.oom": ("out of memory", "内存不足"),
    "state.broken": ("unreadable", "无法读取"),
    "state.pending": ("not started", "未开始"),
    "state.dead": ("dead", "进程已消失"),
    "state.stalled": ("stalled", "停滞"),
    "run.name": ("{id} seed {seed}", "{id} 种子 {seed}"),
    "run.state": ("{id} seed {seed} ({state})", "{id} 种子 {seed}（{state}）"),
    # -- refusals
    "refuse.differs": (
        "{what} differs: {arm} against {reference}",
        "{what}不同：{arm} 对 {reference}",
    ),
    "refuse.config": (
        "{field} differs: {arm} against {reference}",
        "{field} 不同：{arm} 对 {reference}",
    ),
    "refuse.mixed": (
        "the seeds of {id} were not run alike: seeds {a} and {b} differ in {fields}",
        "{id} 的各种子设置不一致：种子 {a} 与 {b} 在以下方面不同：{fields}",
    ),
    "field.metric": ("the metric", "评价指标"),
    "field.data": ("the training data", "训练数据"),
    "field.tokenizer": ("the tokenizer", "分词器"),
    "field.eval_set": ("the evaluation set", "评测集"),
    "field.batch_rows": ("the batch", "批大小"),
    "field.steps": ("the number of steps", "训练步数"),
    "field.schedule": ("the schedule", "学习率调度"),
    # -- flags
    "flag.diverged": (
        "{n} runs diverged and are not in the mean, so there is no verdict: {runs}",
        "{n} 次运行发散，未计入均值，因此不作判定：{runs}",
    ),
    "flag.unfinished": ("{n} not finished: {runs}", "{n} 次运行未完成：{runs}"),
    "flag.test_selection_trials": (
        "tuning trials were evaluated on the test split, so the learning rate may have been "
        "chosen by it: {runs}",
        "调参试验在测试集上做过评测，学习率可能据此选出：{runs}",
    ),
    "flag.test_selection_split": (
        "the reported split is the one that chose the checkpoint, so the figure is too good: {runs}",
        "报告所用的划分就是挑选检查点的划分，数字偏乐观：{runs}",
    ),
    "flag.audit": ("the freeze audit did not hold: {runs}", "冻结审计未通过：{runs}"),
    "flag.untuned": (
        "neither arm's learning rate was tuned ({arm} for both)",
        "两组的学习率都未经调参（均为 {arm}）",
    ),
    "tune.none": ("learning rate {lr}, not tuned", "学习率 {lr}，未调参"),
    "tune.grid": (
        "learning rate {lr} chosen from {grid} over {seeds} seed(s)",
        "学习率 {lr}，在 {seeds} 个种子上从 {grid} 中选出",
    ),
    "flag.grid_edge": (
        "the learning rate of {id} ({lr}) is at the edge of its grid; a better one may lie outside",
        "{id} 的学习率（{lr}）位于网格边缘，更优值可能在网格之外",
    ),
    "flag.trials_missing": (
        "{id}: {have} of {promised} tuning trials are in this runs folder",
        "{id}：本运行文件夹中只有 {promised} 次调参试验中的 {have} 次",
    ),
    "flag.architecture": (
        "different architecture, {field}: {arm} against {reference}; architecture gains are "
        "not attributed to freezing",
        "架构不同，{field}：{arm} 对 {reference}；架构带来的增益不归因于冻结",
    ),
    "flag.setting": (
        "different setting, {field}: {arm} against {reference}",
        "设置不同，{field}：{arm} 对 {reference}",
    ),
    "flag.unknown": (
        "not recorded by either arm, so not checked: {fields}",
        "两组均未记录，因而未检查：{fields}",
    ),
    "flag.identical": (
        "the {n} seeds of {id} agree to the last digit: the seed seems to have no effect",
        "{id} 的 {n} 个种子结果完全相同：种子似乎没有起作用",
    ),
    "flag.welch": (
        "seeds without a partner ({seeds}): Welch's interval over all seeds instead of pairs",
        "存在未配对的种子（{seeds}）：改用全部种子的 Welch 区间",
    ),
    "flag.dropped": (
        "seeds without a partner are left out: {seeds}",
        "未配对的种子不计入：{seeds}",
    ),
    "flag.one_seed": (
        "n = 1: no confidence interval, hence no verdict",
        "n = 1，没有置信区间，因此不作判定",
    ),
    "flag.chance": (
        "{id} did not learn the task: its accuracy is no better than always naming the most frequent class",
        "{id} 没有学会该任务：准确率并不优于总是回答最常见类别",
    ),
    "flag.binomial": (
        "predictions are missing; the test-set error is the binomial one of unpaired answers, which is "
        "too wide",
        "缺少预测文件；测试集误差按未配对的二项分布估计，偏宽",
    ),
    "waiting": (
        "{id} against {reference} ({scale}): waits for finished runs of {missing}",
        "{id} 对 {reference}（{scale}）：等待 {missing} 的运行完成",
    ),
    # -- intervals and verdicts
    "interval": ("{low} to {high}", "{low} 至 {high}"),
    "interval.none": (
        "none",
        "无",
    ),
    "interval.zero": (
        "none, the seeds do not differ",
        "无，各种子结果相同",
    ),
    "interval.wide": (
        "too wide to say anything",
        "过宽，说明不了问题",
    ),
    "outcome.holds": ("within 5 %", "在 5 % 以内"),
    "outcome.fails": ("misses 5 %", "超出 5 %"),
    "outcome.undecided": ("undecided", "未定"),
    "outcome.no interval": ("n = 1, no interval", "n = 1，无区间"),
    "outcome.refused": (
        "not comparable",
        "不可比较",
    ),
    "outcome.withheld": (
        "no verdict",
        "不作判定",
    ),
    "outcome.better": ("better", "更好"),
    "outcome.worse": ("worse", "更差"),
    "outcome.scenario": ("scenario {name}", "情形 {name}"),
    "needed.seeds": (
        "about {n} seeds in all would be enough",
        "总共约 {n} 个种子就够",
    ),
    "needed.spread": (
        "run at least 3 seeds",
        "至少运行 3 个种子",
    ),
    "needed.wide": (
        "n = {n} seeds: the interval is too wide to say anything; run more seeds",
        "n = {n} 个种子：区间过宽，说明不了问题；请运行更多种子",
    ),
    "needed.test set": (
        "the test set is too small to decide, with any number of seeds",
        "测试集太小，再多种子也无法判定",
    ),
    "needed.too close": (
        "too close to the margin to decide with a realistic number of seeds",
        "离界限太近，现实可行的种子数无法判定",
    ),
    "because.diverged": (
        "a diverged seed is an outcome too, so there is no verdict",
        "发散的种子也是一种结果，因此不作判定",
    ),
    "because.chance": (
        "the reference model did not learn the task (accuracy at chance), so no comparison is possible",
        "对照模型没有学会该任务（准确率处于随机水平），因此无法比较",
    ),
    "because.identical": (
        "the two arms gave identical results in every seed, so there is no seed variation to judge by",
        "两组在每个种子上结果完全相同，没有可供判断的种子间差异",
    ),
    "because.no variation": (
        "every seed gave exactly the same difference, so there is no seed variation to judge by",
        "每个种子给出的差异完全相同，没有可供判断的种子间差异",
    ),
    "withheld": (
        "No verdict: {why}.",
        "不作判定：{why}。",
    ),
    "withheld.rates": (
        "not a fair comparison (learning rates {arm} and {reference}, neither tuned)",
        "比较不公平（学习率为 {arm} 与 {reference}，均未调参）",
    ),
    "withheld.tuning": (
        "not a fair comparison (unequal tuning: {arm}; {reference})",
        "比较不公平（调参不对等：{arm}；{reference}）",
    ),
    "withheld.budget": (
        "unusual budget of {id} ({fields})",
        "{id} 的预算不同寻常（{fields}）",
    ),
    "withheld.builtin": (
        "built-in generated text instead of {dataset}",
        "使用内置生成文本代替 {dataset}",
    ),
    "withheld.same_rows": (
        "the same test rows as {others}",
        "测试行与 {others} 相同",
    ),
    "target.holds": ("This is within the 5 % target.{more}", "达到 5 % 的目标。{more}"),
    "target.fails": ("This misses the 5 % target.{more}", "未达到 5 % 的目标。{more}"),
    "target.undecided": (
        "Undecided against the 5 % margin: {more}.",
        "相对 5 % 的界限尚无定论：{more}。",
    ),
    "target.no interval": ("No verdict: {more}.", "不作判定：{more}。"),
    "scenario.A": ("the task type decides", "任务类型起决定作用"),
    "scenario.B": ("the architecture decides", "架构起决定作用"),
    "scenario.C": ("needs more analysis", "需要进一步分析"),
    "scenario.decided": (
        'Scenario {name}, which the original study reads as "{meaning}".',
        "情形 {name}，原研究将其解读为“{meaning}”。",
    ),
    "scenario.undecided": (
        "The scenario is undecided ({possible} possible): {more}.",
        "情形未定（可能为 {possible}）：{more}。",
    ),
    "scenario.no interval": ("No scenario: {more}.", "情形不作判定：{more}。"),
    "orthogonality.better": (
        "Orthonormal rows did better than Gaussian rows of the same norm.",
        "正交行优于同范数的高斯行。",
    ),
    "orthogonality.worse": (
        "Orthonormal rows did worse than Gaussian rows of the same norm.",
        "正交行不如同范数的高斯行。",
    ),
    "orthogonality.undecided": (
        "No significant effect of orthogonality beyond scale.",
        "除尺度外，正交性没有显著作用。",
    ),
    "orthogonality.no interval": (
        "One seed says nothing about orthogonality.",
        "一个种子不足以说明正交性的作用。",
    ),
    "sentence.ppl": (
        "{arm}: perplexity {effect} against {reference} (95 % confidence interval: {interval}; {n}).",
        "{arm}：困惑度相对 {reference} 变化 {effect}（95 % 置信区间：{interval}；{n}）。",
    ),
    "sentence.accuracy": (
        "{arm}: accuracy {effect} points against {reference} (95 % confidence interval: {interval}; {n}).",
        "{arm}：准确率相对 {reference} 变化 {effect} 个百分点（95 % 置信区间：{interval}；{n}）。",
    ),
    "size.ppl": ("{value} of perplexity", "困惑度 {value}"),
    "size.accuracy": ("{value} points of accuracy", "准确率 {value} 个百分点"),
    "plain.baseline.worse": (
        "{arm} is worse than {reference} by {size}.",
        "{arm} 比 {reference} 差（{size}）。",
    ),
    "plain.baseline.better": (
        "{arm} is better than {reference} by {size}.",
        "{arm} 比 {reference} 好（{size}）。",
    ),
    "plain.baseline.undecided": (
        "{arm} and {reference}: no significant difference.",
        "{arm} 与 {reference}：没有显著差别。",
    ),
    "plain.unjudged": (
        "{arm} and {reference}: nothing can be said yet.",
        "{arm} 与 {reference}：尚不能下结论。",
    ),
    "plain.control.worse": (
        "Freezing alone costs {size} ({reference} is the same network with trained Q/K).",
        "仅冻结的代价：{size}（{reference} 是 Q/K 参与训练的同一网络）。",
    ),
    "plain.control.better": (
        "Freezing alone gains {size} ({reference} is the same network with trained Q/K).",
        "仅冻结的收益：{size}（{reference} 是 Q/K 参与训练的同一网络）。",
    ),
    "plain.control.undecided": (
        "Freezing alone: no significant cost ({reference} is the same network with trained Q/K).",
        "仅冻结：没有显著代价（{reference} 是 Q/K 参与训练的同一网络）。",
    ),
    "asks.orthogonality": ("Orthogonality or scale?", "是正交性还是尺度？"),
    "sentence.best": (
        "Best of {n} other frozen arms on validation:",
        "其余 {n} 个冻结组中验证集上最好的一个：",
    ),
    "sentence.refused": (
        "{arm} and {reference} are not compared: {why}.",
        "不比较 {arm} 与 {reference}：{why}。",
    ),
}
