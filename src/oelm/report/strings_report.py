"""Strings of the report's headings, tables and figures, English and Chinese side by side."""

REPORT: dict[str, tuple[str, str]] = {
    "report.title": ("Frozen query/key attention: what it costs", "冻结查询/键注意力：代价几何"),
    "report.made": (
        "From the run folders in {root}, by oelm {version}",
        "由 oelm {version} 根据 {root} 中的运行文件夹生成",
    ),
    "report.counts": (
        "{runs} runs, {finished} finished; {comparisons} comparisons",
        "共 {runs} 次运行，{finished} 次完成；{comparisons} 项比较",
    ),
    "report.command": ("Made again with", "重新生成："),
    "lead": (
        "Frozen arms against their baselines, {n} comparisons: {held} cost at most 5 %, "
        "{failed} cost more, {open} undecided.",
        "冻结组与基线的比较共 {n} 项：{held} 项代价不超过 5 %，{failed} 项代价更大，{open} 项未有定论。",
    ),
    "lead.withheld": (
        "{n} without a verdict: not a fair comparison, or not on the data it names.",
        "{n} 项不作判定：比较不公平，或所用数据并非其名称所指。",
    ),
    "lead.nothing": (
        "There is no finished comparison of a frozen arm with its baseline yet.",
        "目前还没有完成的冻结组与基线的比较。",
    ),
    "link.runs": ("runs", "运行"),
    "group.title": (
        "{task} on {dataset}, {scale} scale ({group})",
        "{dataset} 上的{task}（{scale}规模，{group}）",
    ),
    "task.lm": ("Language modelling", "语言建模"),
    "task.classification": ("Classification", "分类"),
    "task.denoising": ("Denoising", "去噪重建"),
    "task.generation": ("Generation", "生成"),
    "scale.full": ("full", "完整"),
    "scale.mini": ("mini", "迷你"),
    "scale.smoke": ("smoke", "冒烟"),
    "architecture.encoder": ("Encoder (bidirectional)", "编码器（双向）"),
    "architecture.decoder": ("Decoder (causal)", "解码器（因果）"),
    "architecture.encoder-decoder": ("Encoder-decoder", "编码器-解码器"),
    "architecture.other": ("Other", "其他"),
    "role.baseline": ("baseline", "基线"),
    # -- sections
    "section.verdict": ("Verdict", "结论"),
    "section.comparisons": ("Every arm against its baseline", "各组与基线的比较"),
    "section.control": ("What freezing alone costs", "仅冻结的代价"),
    "section.no_loss": ("What closes the gap", "什么能弥补差距"),
    "section.orthogonality": ("Orthogonality or scale?", "正交性还是尺度？"),
    "section.mean": ("On average over datasets", "各数据集平均"),
    "section.figures": ("Training", "训练过程"),
    "section.where": ("Where freezing holds", "冻结在哪里成立"),
    "section.efficiency": ("Cost of each arm", "各组的开销"),
    "section.trend": ("Across datasets", "跨数据集的趋势"),
    "section.reported": ("Reported and reproduced", "报告值与复现值"),
    "section.caveats": ("What this does not show", "本报告没有说明什么"),
    "section.totals": ("Finished and pending", "已完成与待完成"),
    "section.warnings": ("Folders that need attention", "需要注意的文件夹"),
    "section.runs": ("Runs", "运行清单"),
    "about.control": (
        "Each method against the same architecture with trained Q/K: architecture gains are "
        "not attributed to freezing. Initialisation and gain are the same, too, except for "
        "Gaussian rows, whose control starts orthonormal.",
        "每种方法与相同架构但训练 Q/K 的对照相比：架构带来的增益不归因于冻结。"
        "初始化和增益也相同；只有高斯行例外，其对照从正交初始化开始。",
    ),
    "about.mean": (
        "The same two arms over all datasets of a study: the mean change within each seed, and its interval "
        "over seeds, as one seed may draw the same rows for all of them; never narrower than if the "
        "datasets' seeds were independent. It speaks of these datasets, not of others.",
        "同样两组在一项研究的所有数据集上：先在每个种子内对变化取平均，再对种子求区间，"
        "因为同一种子可能为所有数据集抽取相同的行；区间不窄于各数据集种子相互独立时的区间。"
        "它只说明这些数据集，不能推及其他。",
    ),
    "mean.place": ("{study}, {n} datasets ({scale})", "{study}，{n} 个数据集（{scale}）"),
    "about.no_loss": (
        "The goal: at most 1 % above the same architecture with trained Q/K (control), and below each of the "
        "same network without extras trained from an orthonormal start (start; where that is the control "
        "itself, once), the baseline, and the plainer architecture the baseline is measured by (plain). "
        "Reached only if every interval says so, missed if one says the contrary.",
        "目标：相对训练 Q/K 的同架构对照（对照）最多高 1 %，并低于以下各项：从正交初始化训练、不带附加部分的"
        "同一网络（起点；若它就是对照则只算一次）、基线，以及基线所参照的更简单架构（朴素）。"
        "仅当每个区间都支持时才算达到；只要有一个区间相反即为未达到。",
    ),
    "goal.holds": ("reached", "达到"),
    "goal.fails": ("missed", "未达到"),
    "goal.undecided": ("undecided", "未定"),
    "about.orthogonality": (
        "Frozen orthonormal rows against frozen Gaussian rows of the same norm. Against N(0, 0.02), "
        "orthogonality and the size of the attention logits (1 / (0.02² d) times as large: 4.9 at width 512, "
        "20 at 128) change together, and nothing can be said about either.",
        "冻结的正交行与同范数的冻结高斯行相比。若与 N(0, 0.02) 相比，正交性和注意力 logit 的大小"
        "（为其 1 / (0.02² d) 倍：宽度 512 时 4.9，128 时 20）同时改变，二者都无从判断。",
    ),
    "about.efficiency": (
        "Quality is the change of perplexity (lower is better) or accuracy (higher is better) against the "
        "baseline. Step time is shown only "
        "from an "
        "interleaved benchmark; beside it stands what the FLOP model allows at most.",
        "质量指困惑度（越低越好）或准确率（越高越好）相对基线的变化。"
        "步时仅取自交错基准测试；旁边列出 FLOP 模型允许的最大节省。",
    ),
    "about.benchmarks": ("Step times from {files}.", "步时取自 {files}。"),
    "about.reported": (
        "Left the original study's printed figures, right our runs at the scale named. They are never "
        "averaged or mixed; at another scale only the direction of a gap can be compared.",
        "左为原研究公布的数字，右为我们在所注规模下的运行。二者从不平均或混用；"
        "规模不同时只能比较差距的方向。",
    ),
    "about.runs": (
        "Each number above leads here: its seeds, their folders, and the command that makes it again.",
        "上文每个数字都指向这里：对应的种子、文件夹以及重新得到它的命令。",
    ),
    "data.origin": ("{dataset}: {origin}, {rows} rows to train on", "{dataset}：{origin}，训练用 {rows} 行"),
    # -- columns
    "col.arm": ("Arm", "组"),
    "col.against": ("Against", "对照"),
    "col.verdict": ("Verdict", "判定"),
    "col.scenario": ("Scenario", "情形"),
    "col.ppl": ("Perplexity", "困惑度"),
    "col.accuracy": ("Accuracy", "准确率"),
    "col.change": ("Change", "变化"),
    "col.ratio": ("Relative", "相对变化"),
    "col.interval": ("95 % interval", "95 % 区间"),
    "col.seeds": ("n", "n"),
    "col.data": ("Data", "数据"),
    "col.quality": ("Quality", "质量"),
    "quality.ppl": ("perplexity {change}", "困惑度 {change}"),
    "quality.accuracy": ("accuracy {change}", "准确率 {change}"),
    "col.trainable": ("Trained", "可训练参数"),
    "col.frozen": ("Frozen", "冻结参数"),
    "col.frozen_share": ("Frozen share", "冻结占比"),
    "col.qk_trained": ("Q/K trained", "Q/K 可训练占比"),
    "col.goal": ("Goal", "目标"),
    "col.against_control": ("Against control", "与对照相比"),
    "col.against_start": ("Against start", "与起点相比"),
    "col.against_baseline": ("Against baseline", "与基线相比"),
    "col.against_plain": ("Against plain", "与朴素架构相比"),
    "col.checkpoint": ("Checkpoint", "检查点"),
    "col.memory": ("Peak memory", "峰值内存"),
    "col.step": ("Step time ratio", "步时比"),
    "col.bound": ("FLOP bound", "FLOP 上限"),
    "col.architecture": ("Architecture", "架构"),
    "col.task": ("Task", "任务"),
    "col.weights": ("Weights", "权重"),
    "weights.pretrained": ("pretrained", "预训练"),
    "weights.scratch": ("from scratch", "从头训练"),
    "col.holds": ("Within 5 %", "5 % 以内"),
    "col.fails": ("Misses 5 %", "超出 5 %"),
    "col.open": ("Not decided", "未定"),
    "col.tokens": ("Training tokens", "训练词元数"),
    "col.total": ("Total", "合计"),
    "col.id": ("ID", "编号"),
    "col.reported": ("Reported by the original study", "原研究报告"),
    "col.ours": ("Ours", "我们的结果"),
    "col.reported_change": ("Change, reported", "变化（报告）"),
    "col.ours_change": ("Change, ours", "变化（复现）"),
    "col.scale": ("Scale", "规模"),
    "col.seed": ("Seed", "种子"),
    "col.state": ("State", "状态"),
    "col.folder": ("Folder", "文件夹"),
    "col.command": ("Command", "命令"),
    "col.test": ("Test", "测试"),
    "command.number": ("command {n}", "命令 {n}"),
    "step.none": ("not benchmarked", "未做基准测试"),
    "total.runs": ("Runs", "运行"),
    "total.trials": ("Tuning trials", "调参试验"),
    "total.compute": ("Compute time", "计算时间"),
    "total.disk": ("Disk", "磁盘"),
    "notes": ("What to know about these numbers:", "关于这些数字，须知："),
    "fold.runs": ("{study}: {n} runs", "{study}：{n} 次运行"),
    "trend.few": (
        "{arm}: {n} datasets are too few to test for a trend (five are the least).",
        "{arm}：{n} 个数据集太少，无法检验趋势（至少需要五个）。",
    ),
    "trend.tau": (
        "{arm}: Kendall's tau of the gap with the training tokens is {tau} (p = {p}, {n} datasets).",
        "{arm}：差距与训练词元数的 Kendall τ 为 {tau}（p = {p}，{n} 个数据集）。",
    ),
    "pending.run": (
        "{id} seed {seed} ({scale}): {state} at step {progress}{reason}",
        "{id} 种子 {seed}（{scale}）：{state}，步数 {progress}{reason}",
    ),
    "pending.never": ("In the catalogue, never started ({n})", "目录中尚未启动（{n}）"),
    "pending.nothing": ("No run that was started is pending.", "已启动的运行没有待完成的。"),
    "none.comparisons": ("No comparison has finished runs on both sides yet.", "还没有两侧都完成的比较。"),
    "none.control": (
        "No arm names an own-architecture control with finished runs.",
        "没有带已完成同架构对照的组。",
    ),
    "none.orthogonality": (
        "No frozen orthonormal arm has a finished scale-matched Gaussian twin, so nothing can be said.",
        "没有冻结正交组拥有已完成的同尺度高斯对照，因此无从判断。",
    ),
    "none.frozen": ("No frozen arm has been compared yet.", "还没有冻结组参与比较。"),
    "none.finished": ("No run has finished yet.", "还没有完成的运行。"),
    "none.trend": ("No arm was compared on more than one dataset.", "没有任何组在多个数据集上比较过。"),
    "none.reported": (
        "None of these experiments has a figure printed by the original study.",
        "这些实验没有原研究公布的数字。",
    ),
    # -- figures
    "figure.limited": (
        "Curves are drawn for the first {drawn} of {n} groups; `oelm report STUDY` draws one study's.",
        "仅绘制 {n} 组中前 {drawn} 组的曲线；用 `oelm report STUDY` 可绘制单个研究的曲线。",
    ),
    "figure.gap": (
        "Change of perplexity against the baseline. Dot: mean over seeds; bar: 95 % interval; dashed: the "
        "5 % target. "
        "A hollow dot has one seed and no interval.",
        "困惑度相对基线的变化。点：各种子均值；横线：95 % 区间；虚线：5 % 目标。空心点只有一个种子，"
        "没有区间。",
    ),
    "figure.gap.axis": ("change of perplexity, %", "困惑度变化（%）"),
    "figure.accuracy": (
        "Test accuracy, mean over seeds; the line is the 95 % interval of the difference from the "
        "baseline, drawn at the arm. Hollow: the baseline, or an arm of one seed.",
        "测试准确率（各种子均值）；横线为与基线之差的 95 % 区间，画在该组处。"
        "空心：基线，或只有一个种子的组。",
    ),
    "figure.accuracy.lines": (
        "Dashed: two and five points below the baseline, the cuts between scenarios A, C and B.",
        "虚线：低于基线 2 点和 5 点，即情形 A、C、B 的分界。",
    ),
    "figure.accuracy.axis": ("accuracy, %", "准确率（%）"),
    "figure.curves": (
        "Validation loss, {title}. Line: mean over seeds; band: lowest to highest seed.",
        "验证损失，{title}。线：各种子均值；带：最低到最高的种子。",
    ),
    "figure.curves.x": ("step", "步"),
    "figure.curves.y": ("validation loss", "验证损失"),
    "figure.parameters": (
        "Arms that freeze, probes left out: share of Q/K parameters that train against the change in "
        "quality. Lower is better on both axes.",
        "冻结的各组（不含探针任务）：可训练的 Q/K 参数占比与质量变化。两轴都是越低越好。",
    ),
    "figure.parameters.x": ("trained share of Q/K, %", "可训练 Q/K 占比（%）"),
    "figure.parameters.y": ("loss of quality, %", "质量损失（%）"),
    "figure.attention": (
        "Attention during training, {title}: mean over heads, layers and seeds of each arm.",
        "训练中的注意力，{title}：每组对头、层和种子取平均。",
    ),
    "figure.heads": (
        "Entropy of attention per layer and head at the end of training, {title} (first seed).",
        "训练结束时各层各头的注意力熵，{title}（首个种子）。",
    ),
    "figure.heads.x": ("head", "头"),
    "figure.heads.y": ("layer", "层"),
    "attention.entropy": ("entropy of attention, nats", "注意力熵（nats）"),
    "attention.logit_scale": ("scale of logits", "logit 尺度"),
    "attention.orthogonality": ("distance from orthogonal", "与正交的距离"),
    # -- caveats
    "caveat.seeds": (
        "Perplexity intervals cover the seeds, not the choice of test text. Accuracy intervals cover both.",
        "困惑度区间只反映种子的波动，不反映测试文本的选择；准确率区间两者都包括。",
    ),
    "caveat.many": (
        "{n} comparisons were made; each interval stands for itself, with no correction for their number. "
        "Of as many arms "
        "lying exactly on a cut, about {wrong} would be judged wrongly by chance.",
        "共做了 {n} 项比较；每个区间各自成立，未对数量作校正。若这些组都恰在界线上，"
        "约有 {wrong} 项会因偶然而误判。",
    ),
    "caveat.rates": (
        "A tuned rate is the best of its arm's grid on validation, by trials of {seeds} seed(s). The "
        "intervals take it as given: another draw of trials may choose a neighbouring rate.",
        "经调参的学习率取该组网格中验证集上最好的一个，试验用 {seeds} 个种子。区间以所选学习率为前提："
        "换一批试验，可能选中相邻的学习率。",
    ),
    "caveat.scale": (
        "At {scales} scale a small network trains briefly: the gap may grow or vanish in longer training "
        "and larger models.",
        "在{scales}规模下，小网络只训练很短时间：训练更久、模型更大时，差距可能扩大，也可能消失。",
    ),
    "caveat.data": ("{dataset}: {origin}", "{dataset}：{origin}"),
    "caveat.time": (
        "No step time is claimed for arms without an interleaved benchmark; wall times of separate runs "
        "are not compared.",
        "没有交错基准测试的组不作任何步时声明；不比较各次运行的墙钟时间。",
    ),
    "caveat.diverged": (
        "{n} runs diverged. They are outcomes, not missing values; verdicts that would leave them out are "
        "withheld.",
        "有 {n} 次运行发散。它们是结果而非缺失值；凡需忽略它们才能得出的判定一律不作。",
    ),
    "caveat.bootstrap": (
        "Deciding intervals are Student's t. A bootstrap (BCa) over seeds is added to the JSON output "
        "from five seeds on; with "
        "fewer it would be far too narrow.",
        "用于判定的是 Student t 区间。种子数达到五个时，JSON 输出另附对种子的自助法（BCa）区间；"
        "更少时它会窄得失真。",
    ),
}
