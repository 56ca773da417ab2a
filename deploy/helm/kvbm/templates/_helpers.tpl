{{- define "kvbm.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvbm.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvbm.labels" -}}
{{ include "kvbm.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* kvbm's own memory with SGLang, in which pages wait until the store has them. */}}
{{- define "kvbm.waitingGiB" -}}
{{- if and (eq .Values.engine "sglang") .Values.tiers.shared.enabled -}}4{{- else -}}0{{- end -}}
{{- end -}}

{{- define "kvbm.memoryGiB" -}}
{{- add .Values.tiers.host.capacityGiB .Values.memory.shmGiB .Values.memory.processesGiB (include "kvbm.waitingGiB" . | int64) -}}
{{- end -}}

{{/* Size of the volume for G3: its capacity, plus 10% and 1 GiB for the index. A pod above the limit is evicted. */}}
{{- define "kvbm.blocksGiB" -}}
{{- add 1 (div (mul .Values.tiers.disk.capacityGiB 11) 10) -}}
{{- end -}}

{{/* Ephemeral storage of the node that the pod may use. */}}
{{- define "kvbm.ephemeralGiB" -}}
{{- $volumes := add .Values.homeGiB .Values.temporaryGiB -}}
{{- if and .Values.tiers.disk.enabled (eq .Values.tiers.disk.volume.kind "emptyDir") -}}
{{- $volumes = add $volumes (include "kvbm.blocksGiB" . | int64) -}}
{{- end -}}
{{- $volumes -}}
{{- end -}}

{{/* preStop, the time in which `kvbm serve` stops the engine (30 s and the drain times), and 15 s in reserve. */}}
{{- define "kvbm.graceSeconds" -}}
{{- $seconds := add .Values.preStopSeconds 30 15 -}}
{{- if .Values.tiers.disk.enabled -}}
{{- $seconds = add $seconds .Values.tiers.disk.drainSeconds -}}
{{- end -}}
{{- if .Values.tiers.shared.enabled -}}
{{- $seconds = add $seconds .Values.tiers.shared.drainSeconds -}}
{{- end -}}
{{- $seconds -}}
{{- end -}}

{{- define "kvbm.vllmArguments" -}}
{{- $arguments := deepCopy .Values.engineArguments -}}
{{- if and (gt (int .Values.gpu.count) 1) (not (hasKey $arguments "tensor_parallel_size")) -}}
{{- $_ := set $arguments "tensor_parallel_size" .Values.gpu.count -}}
{{- end -}}
{{- toYaml $arguments -}}
{{- end -}}

{{/* `hicache_size` is in GB per rank. */}}
{{- define "kvbm.sglangArguments" -}}
{{- $own := dict "tp_size" .Values.gpu.count "hicache_mem_layout" "page_first" -}}
{{- $_ := set $own "context_length" .Values.engineArguments.max_model_len -}}
{{- if not (hasKey .Values.engineArguments "hicache_ratio") -}}
{{- $gigabytes := div (mul .Values.tiers.host.capacityGiB 1073741824) (mul .Values.gpu.count 1000000000) -}}
{{- $_ := set $own "hicache_size" (max 1 $gigabytes) -}}
{{- end -}}
{{- toYaml (merge (omit (deepCopy .Values.engineArguments) "max_model_len") $own) -}}
{{- end -}}

{{- define "kvbm.profile" -}}
{{- $arguments := include (printf "kvbm.%sArguments" .Values.engine) . | fromYaml -}}
{{- $tiers := dict -}}
{{- if eq .Values.engine "vllm" -}}
{{- $_ := set $tiers "host" (dict "capacity" (printf "%dGiB" (int64 .Values.tiers.host.capacityGiB))) -}}
{{- else if .Values.tiers.shared.enabled -}}
{{- $_ := set $tiers "host" (dict "capacity" (printf "%sGiB" (include "kvbm.waitingGiB" .))) -}}
{{- end -}}
{{- if .Values.tiers.disk.enabled -}}
{{- $disk := dict "capacity" (printf "%dGiB" (int64 .Values.tiers.disk.capacityGiB)) "directory" "/var/cache/kvbm/blocks" "drain_s" .Values.tiers.disk.drainSeconds -}}
{{- if and (eq .Values.tiers.disk.volume.kind "claim") (not (hasKey .Values.tiers.disk.keys "reclaim")) -}}
{{- $_ := set $disk "reclaim" true -}}
{{- end -}}
{{- $_ := set $tiers "disk" (merge $disk .Values.tiers.disk.keys) -}}
{{- end -}}
{{- if .Values.tiers.shared.enabled -}}
{{- $shared := dict "url" .Values.tiers.shared.url "drain_s" .Values.tiers.shared.drainSeconds -}}
{{- $_ := set $tiers "shared" (merge $shared .Values.tiers.shared.keys) -}}
{{- end -}}
{{- $profile := dict "engine" (dict "kind" .Values.engine "model" .Values.model "arguments" $arguments) "tiers" $tiers -}}
{{- $_ := set $profile "server" (dict "host" "0.0.0.0" "port" 8000) -}}
{{- $_ := set $profile "transfer" (dict "init_timeout_s" .Values.startTimeoutSeconds) -}}
{{- if eq .Values.engine "sglang" -}}
{{- $_ := set $profile "metrics" (dict "serve" true "port" 6880) -}}
{{- end -}}
{{- toYaml (merge $profile .Values.profile) -}}
{{- end -}}
